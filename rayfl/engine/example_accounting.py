"""What the privacy of a client's samples promises: its epsilon.

Two data sets are neighbours if one has an empty record, whose gradient is zero, in the place of a sample of the other:
n_k, the number of steps and the sampling rate are public. A step is then the Poisson-sampled normal mechanism.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rayfl.engine.accountants import Mechanism, spent
from rayfl.engine.updates.batches import sampling_rate
from rayfl.messages.privacy import Accountant, PrivacyConfig


class Exposure(NamedTuple):
    """What the samples of one client go through.

    Attributes:
        mechanisms: those of its steps; none for a client that takes none.
        delta: its delta.
    """

    mechanisms: tuple[Mechanism, ...]
    delta: float

    def epsilon(self, accountant: Accountant) -> float:
        """Returns epsilon of (epsilon, delta)-differential privacy; raises as :func:`spent`."""
        return spent(self.mechanisms, self.delta, accountant) if self.mechanisms else 0.0


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
    return exposure_of(privacy, batches, samples, batch_size).epsilon(privacy.accountant)


def exposure_of(privacy: PrivacyConfig, batches: Mapping[int, int], samples: int, batch_size: int | None) -> Exposure:
    """Returns what the samples of one client go through; arguments are those of :func:`example_epsilon`."""
    drawn = sorted((steps, count) for steps, count in batches.items() if count and steps)
    if not drawn or not samples:
        return Exposure((), 1.0)
    rate, z = sampling_rate(samples, batch_size), privacy.example_noise_multiplier
    mechanisms = tuple((z / math.sqrt(steps), rate, count) for steps, count in drawn)
    return Exposure(mechanisms, privacy.example_delta_of(samples))


def largest_and_middle(exposures: Sequence[Exposure], accountant: Accountant) -> tuple[float, float]:
    """Returns the largest epsilon of some clients, and that in the middle.

    With ``rdp`` they are the maximum and the median. With ``prv``, which takes a second or more for each exposure, few
    are computed. The middle one is that of the client (two: their mean) in the middle by ``rdp``. The largest one is
    found by bounds: a group of clients has no larger epsilon than somebody with the largest sampling rate, the most
    steps and the smallest delta among them, since epsilon grows with the former two and falls with the latter. The
    group with the largest bound is divided until it is clients who are alike, so that no client has a larger epsilon.

    Args:
        exposures: at least one.
        accountant: ``privacy.accountant``.

    Raises:
        ImportError: opacus is not installed.
    """
    rough = {one: one.epsilon("rdp") for one in set(exposures)}
    ordered, count = sorted(exposures, key=rough.__getitem__), len(exposures)
    middle = [one.epsilon(accountant) for one in (ordered[(count - 1) // 2], ordered[count // 2])]
    if accountant == "rdp":
        return rough[ordered[-1]], sum(middle) / 2
    group = [one for one in rough if one.mechanisms]
    groups = [(-_dominating(group).epsilon(accountant), 0, group)] if group else []
    bound, number = 0.0, itertools.count(1)
    while groups:
        bound, _, group = heapq.heappop(groups)
        if len(group) == 1:
            break
        for half in _halves(group):
            heapq.heappush(groups, (-_dominating(half).epsilon(accountant), next(number), half))
    return -bound, sum(middle) / 2


def _halves(group: list[Exposure]) -> tuple[list[Exposure], list[Exposure]]:
    """Divides exposures by sampling rate or by steps, whichever makes more of a difference to epsilon in the group."""

    def rate(one: Exposure) -> float:
        return math.log(one.mechanisms[0][1])

    def steps(one: Exposure) -> float:
        return math.log(sum(count for _, _, count in one.mechanisms)) / 2  # epsilon grows about with the root

    by = max((rate, steps), key=lambda by: max(map(by, group)) - min(map(by, group)))
    ordered = sorted(group, key=lambda one: (by(one), one))
    return ordered[: len(group) // 2], ordered[len(group) // 2 :]


def _dominating(exposures: Sequence[Exposure]) -> Exposure:
    """Returns an exposure that tells no less than any of some; of one of them, itself."""
    rate = max((rate for one in exposures for _, rate, _ in one.mechanisms), default=0.0)
    counts: dict[float, int] = {}
    for one in exposures:
        for z, _, count in one.mechanisms:
            counts[z] = max(counts.get(z, 0), count)
    mechanisms = tuple((z, rate, count) for z, count in sorted(counts.items(), reverse=True))
    return Exposure(mechanisms, min(one.delta for one in exposures))
