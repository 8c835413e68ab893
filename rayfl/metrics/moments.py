"""Mean and mean square of the losses of samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from rayfl.metrics.measures import Measures, Metric
from rayfl.metrics.statistics import Statistics


class LossMoments(Measures):
    """Sums of losses that have been found before: a vector has their number, their sum, and that of their squares."""

    size = 3
    metrics = (Metric("loss", "loss", "lower", digits=4), Metric("square", "mean squared loss", "lower", digits=4))

    def statistics(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Not of predictions: losses are what a task makes of them; see :func:`moments_of`."""
        raise NotImplementedError

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        counts = np.where(vectors[..., 0] > 0, vectors[..., 0], np.nan)
        return {"loss": vectors[..., 1] / counts, "square": vectors[..., 2] / counts}


_MEASURES = LossMoments()


def moments_of(losses: np.ndarray) -> Statistics:
    """The statistics of samples whose losses are given, float64 of shape (n,)."""
    return Statistics(np.array([len(losses), losses.sum(), np.square(losses).sum()]), _MEASURES)
