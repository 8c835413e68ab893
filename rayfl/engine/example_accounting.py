"""What the privacy of a client's samples promises: its epsilon.

Two data sets are neighbours if one has an empty record, whose gradient is zero, in the place of a sample of the other:
n_k, the number of steps and the sampling rate are public. A step is then the Poisson-sampled normal mechanism.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import lru_cache

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
    return _epsilon(privacy.example_noise_multiplier, rate, drawn, privacy.example_delta_of(samples))


@lru_cache(maxsize=1 << 14)
def _epsilon(noise: float, rate: float, drawn: tuple[tuple[int, int], ...], delta: float) -> float:
    """Returns what opacus' RDP accountant finds with all of its orders, of which it needs to see few."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its orders, one is at the edge for very little or very much noise
        from opacus.accountants import RDPAccountant

        accountant = RDPAccountant()
        accountant.history = [(noise / math.sqrt(steps), rate, count) for steps, count in drawn]
        orders = accountant.DEFAULT_ALPHAS
        # those that are no integers take most of the time, and the best one is beside the best integer
        whole = [order for order in orders if float(order).is_integer()]
        found, best = accountant.get_privacy_spent(delta=delta, alphas=whole)
        near = [order for order in orders if abs(order - best) <= 2]
        return max(float(min(found, accountant.get_epsilon(delta, alphas=near))), 0.0)
