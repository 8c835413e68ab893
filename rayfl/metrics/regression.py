"""Regression: squared and absolute errors, and the share of the variance that is explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.measures import MeasuresBySample, Metric, counted, ratio

_METRICS = (
    Metric("mse", "MSE", "lower", digits=4),
    Metric("mae", "MAE", "lower", digits=4),
    Metric("r2", "R2", "higher"),
    Metric("loss", "loss", "lower", digits=4),
)
_CONSTANT = 1e-12
"""Sums of squares about the mean below this share of the sum of squares are round-off: the targets are constant."""


class RegressionMeasures(MeasuresBySample):
    """Errors of numbers, each a mean over samples and outputs.

    ``r2`` is the coefficient of determination, 1 minus squared errors by squared deviations from the mean of the
    targets, mean over outputs. It is undefined where a target is the same for all samples, or differs by less than a
    millionth of its size.

    Args:
        outputs: numbers predicted of a sample.
        loss: of each prediction, given predictions and targets, all of shape (n, outputs).
    """

    metrics = _METRICS

    def __init__(self, outputs: int, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.outputs, self._loss = outputs, loss
        self.size = 2 + 4 * outputs

    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """See the base class; both of shape (n, outputs). One tensor of shape (n, ``size``)."""
        y, errors = targets.double(), predictions.double() - targets.double()
        losses = self._loss(predictions.double(), y).mean(-1, keepdim=True)
        return (torch.cat([torch.ones_like(losses), losses, errors.square(), errors.abs(), y, y.square()], -1),)

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class."""
        return counted(found[0], mask).sum(-2)

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        n, sums = vectors[..., 0], vectors[..., 2:].reshape(*vectors.shape[:-1], 4, self.outputs)
        squared, absolute, y, squares = (sums[..., i, :] for i in range(4))
        deviations = squares - ratio(y**2, n[..., None], 0)
        varies = (deviations > _CONSTANT * squares).all(-1)
        explained = 1 - ratio(squared, deviations, 0)
        return {
            "mse": ratio(squared.mean(-1), n),
            "mae": ratio(absolute.mean(-1), n),
            "r2": np.where(varies, explained.mean(-1), np.nan),
            "loss": ratio(vectors[..., 1], n),
        }

    def undefined(self, name: str) -> str:
        """See the base class."""
        return "all targets are the same" if name == "r2" else ""
