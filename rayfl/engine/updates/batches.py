"""Plans the mini-batches of a local update, for the looped and the vectorised engine alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchPlan:
    """The mini-batches of one local update, as one index array.

    Attributes:
        order: sample indices of all steps, one after the other, int64.
        bounds: step s uses ``order[bounds[s]:bounds[s + 1]]``.
    """

    order: Tensor
    bounds: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Number of local steps."""
        return len(self.bounds) - 1

    @property
    def largest(self) -> int:
        """Samples of the largest mini-batch; 0 without any."""
        return max((stop - start for start, stop in pairwise(self.bounds)), default=0)

    def part(self, first: int, last: int) -> BatchPlan:
        """Returns the plan of steps ``first`` to ``last`` (exclusive, clamped to the plan's end)."""
        bounds = self.bounds[first : last + 1]
        return BatchPlan(self.order[bounds[0] : bounds[-1]], tuple(bound - bounds[0] for bound in bounds))

    def batches(self, device: torch.device) -> list[Tensor]:
        """Returns one index tensor per step, on ``device``."""
        return list(torch.split(self.order.to(device), [stop - start for start, stop in pairwise(self.bounds)]))


def epoch_samples(samples: int, batch_size: int | None, drop_last: bool = False) -> int:
    """Returns the samples per epoch: all, or with ``drop_last`` those of full batches (all if none is full)."""
    size = batch_size or samples
    return samples - samples % size if drop_last and samples > size else samples


def num_steps(samples: int, batch_size: int | None, epochs: int, drop_last: bool = False) -> int:
    """Returns the number of steps in ``epochs`` epochs; an epoch's partial batch counts unless it is dropped."""
    return epochs * -(-epoch_samples(samples, batch_size, drop_last) // (batch_size or samples)) if samples else 0


def plan_batches(
    samples: int,
    batch_size: int | None,
    steps: int,
    generator: np.random.Generator,
    repeats: int = 1,
    *,
    drop_last: bool = False,
    shuffle: bool = True,
) -> BatchPlan:
    """Draws shuffled mini-batches; by default with a new permutation every epoch, and keeping its partial batch.

    Args:
        samples: n, the client's training samples.
        batch_size: B; None takes all samples at once.
        steps: mini-batches to draw; the last epoch may be incomplete.
        generator: the stream ``batches`` of this client and round; one permutation is drawn per epoch begun.
        repeats: how many consecutive steps use each mini-batch.
        drop_last: leave out an epoch's last batch where it is smaller than B, unless it is the only one.
        shuffle: false takes the first permutation in every epoch.
    """
    an_epoch = num_steps(samples, batch_size, 1, drop_last)
    if an_epoch == 0 or steps == 0:
        return BatchPlan(torch.zeros(0, dtype=torch.int64), (0,))
    size, used = batch_size or samples, epoch_samples(samples, batch_size, drop_last)
    drawn = [generator.permutation(samples)]
    for _ in range(1, -(-steps // an_epoch)):
        drawn.append(generator.permutation(samples) if shuffle else drawn[0])
    once, bounds = _bounds(size, used, steps, 1), _bounds(size, used, steps, repeats)
    order = (np.concatenate([part[:used] for part in drawn]) if len(drawn) > 1 else drawn[0])[: once[-1]]
    if repeats != 1:
        pieces = [order[start:stop] for start, stop in pairwise(once) for _ in range(repeats)]
        order = np.concatenate(pieces or [order[:0]])
    return BatchPlan(torch.from_numpy(order), bounds)


def joined(first: BatchPlan, second: BatchPlan, offset: int) -> BatchPlan:
    """Returns a plan whose mini-batches have those of one plan, and then those of another.

    Args:
        first: its samples keep their numbers.
        second: a plan of as many steps, or without any; likewise the first.
        offset: what is added to the numbers of the second plan's samples.
    """
    steps = max(first.steps, second.steps)
    parts: list[Tensor] = []
    sizes = [0] * steps
    for step in range(steps):
        for plan, added in ((first, 0), (second, offset)):
            if plan.steps:
                parts.append(plan.order[plan.bounds[step] : plan.bounds[step + 1]] + added)
                sizes[step] += len(parts[-1])
    order = torch.cat(parts) if parts else first.order
    return BatchPlan(order, tuple(accumulate(sizes, initial=0)))


def poisson_batches(
    samples: int, batch_size: int | None, steps: int, generator: np.random.Generator, repeats: int = 1
) -> BatchPlan:
    """Draws mini-batches that have each sample with probability min(B / n, 1), by itself; some may be empty.

    Args:
        samples: n, the client's training samples.
        batch_size: B; None takes all samples at once.
        steps: mini-batches to draw.
        generator: the stream ``batches`` of this client and round.
        repeats: how many consecutive steps use each mini-batch.
    """
    if not samples:
        return BatchPlan(torch.zeros(0, dtype=torch.int64), (0,))
    rate = sampling_rate(samples, batch_size)
    drawn = [np.flatnonzero(generator.random(samples) < rate) for _ in range(steps)]
    found = [batch for batch in drawn for _ in range(repeats)]
    order = np.concatenate([np.zeros(0, np.int64), *found])
    return BatchPlan(torch.from_numpy(order), tuple(accumulate(map(len, found), initial=0)))


def sampling_rate(samples: int, batch_size: int | None) -> float:
    """Returns min(B / n, 1), the probability of a sample to be in a Poisson mini-batch.

    Args:
        samples: n, above 0.
        batch_size: B; None stands for n.
    """
    return 1.0 if batch_size is None else min(batch_size / samples, 1.0)


@lru_cache
def _bounds(size: int, used: int, steps: int, repeats: int) -> tuple[int, ...]:
    """Returns the bounds of a plan's mini-batches; cached, so clients with equal sizes share one tuple.

    Args:
        size: samples of a mini-batch.
        used: samples of an epoch.
        steps: how many mini-batches.
        repeats: how many consecutive steps use each.
    """
    sizes = [min(size, used - begin) for begin in range(0, used, size)]
    batches = (sizes[step % len(sizes)] for step in range(steps) for _ in range(repeats))
    return tuple(accumulate(batches, initial=0))
