"""What the privacy of a client's samples promises: its epsilon.

Two data sets are neighbours if one has an empty record, whose gradient is zero, in the place of a sample of the other:
n_k, the number of steps and the sampling rate are public. A step is then the Poisson-sampled normal mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rayfl.engine.accountants import spent
from rayfl.engine.updates.batches import sampling_rate
from rayfl.messages.privacy import PrivacyConfig


def example_epsilon(privacy: PrivacyConfig, batches: Mapping[int, int], samples: int, batch_size: int | None) -> float:
    """Returns epsilon of (epsilon, delta)-differential privacy of the samples of one client.

    Several steps on one mini-batch, each with noise of its own, are one step with less noise: z / sqrt(their number).

    Args:
        privacy: its section; gradients have noise.
        batches: how many mini-batches the client has drawn, by the steps that it has taken on each.
        samples: n_k.
        batch_size: B; None: all samples.

    Raises:
        ImportError: opacus is not installed.
    """
    drawn = tuple(sorted((steps, count) for steps, count in batches.items() if count and steps))
    if not drawn or not samples:
        return 0.0
    rate = sampling_rate(samples, batch_size)
    z, delta = privacy.example_noise_multiplier, privacy.example_delta_of(samples)
    return spent(tuple((z / math.sqrt(steps), rate, count) for steps, count in drawn), delta, privacy.accountant)
