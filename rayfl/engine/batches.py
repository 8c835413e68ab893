"""Which samples make which mini-batch: the same for the looped and the vectorised engine."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchPlan:
    """The mini-batches of one local update.

    Attributes:
        order: sample indices of all epochs, one permutation after the other, int64 of shape (epochs * n,).
        bounds: step s uses ``order[bounds[s]:bounds[s + 1]]``.
    """

    order: Tensor
    bounds: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Number of local steps."""
        return len(self.bounds) - 1

    def batches(self, device: torch.device) -> list[Tensor]:
        """Index tensors on ``device``, one a step."""
        order = self.order.to(device)
        return [order[start:stop] for start, stop in pairwise(self.bounds)]


def num_steps(samples: int, batch_size: int | None, epochs: int) -> int:
    """Local steps of ``epochs`` passes; the last partial batch of an epoch counts."""
    return epochs * -(-samples // (batch_size or samples)) if samples else 0


def plan_batches(samples: int, batch_size: int | None, epochs: int, generator: np.random.Generator) -> BatchPlan:
    """Shuffled batches, a new permutation every epoch, the last partial batch kept.

    Args:
        samples: n, the client's training samples.
        batch_size: B; None takes all samples at once.
        epochs: local epochs; 0 gives no step.
        generator: the stream ``batches`` of this client and round.
    """
    if samples == 0 or epochs == 0:
        return BatchPlan(torch.zeros(0, dtype=torch.int64), (0,))
    order = np.concatenate([generator.permutation(samples) for _ in range(epochs)])
    size = batch_size or samples
    starts = [epoch * samples + begin for epoch in range(epochs) for begin in range(0, samples, size)]
    return BatchPlan(torch.from_numpy(order), (*starts, epochs * samples))
