"""Mean and mean square of the losses of samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.measures import Measures, Metric, ratio
from rayfl.metrics.statistics import Statistics


class LossMoments(Measures):
    """Sums of losses that were found before: a vector has their number, their sum, and that of their squares."""

    size = 3
    metrics = (Metric("loss", "loss", "lower", digits=4), Metric("square", "mean squared loss", "lower", digits=4))

    def statistics(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """The sums of losses.

        Args:
            predictions: the losses, shape (n,).
            targets: not looked at: the losses are of these already.
        """
        losses = predictions.double()
        return torch.stack([torch.ones_like(losses), losses, losses.square()]).sum(-1)

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        return {name: ratio(vectors[..., 1 + place], vectors[..., 0]) for place, name in enumerate(("loss", "square"))}


_MEASURES = LossMoments()


def moments_of(losses: np.ndarray) -> Statistics:
    """The statistics of samples whose losses are given, float64 of shape (n,)."""
    found = torch.from_numpy(losses)
    return Statistics.from_vector(_MEASURES.statistics(found, found), _MEASURES)
