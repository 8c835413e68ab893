"""Forecasts: squared and absolute errors, and how much better they are than a naive forecast."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.measures import MeasuresBySample, Metric, counted, ratio

METRICS = (
    Metric("mse", "MSE", "lower", digits=4),
    Metric("skill", "skill", "higher"),
    Metric("mae", "MAE", "lower", digits=4),
    Metric("loss", "loss", "lower", digits=4),
)


class ForecastMeasures(MeasuresBySample):
    """Errors of forecasts, each a mean over windows, series and times.

    ``skill`` is 1 minus the squared errors by those of a naive forecast of the same windows (the skill score of Murphy,
    Monthly Weather Review 1988, with that as its reference): 1 is perfect, 0 as good as the naive one, and below 0
    worse. It has no unit. It is undefined where the naive forecast is perfect.

    Args:
        loss: of each number, given forecasts and targets, all of shape (n, D).
        scaled: whether the data are scaled, so that errors are in units of deviations, or their squares.
    """

    size = 5

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], scaled: bool = False) -> None:
        self._loss = loss
        unit = "scaled" if scaled else ""
        self.metrics = tuple(one if one.name == "skill" else replace(one, unit=unit) for one in METRICS)

    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """See the base class; forecasts of shape (n, D), targets (n, 2, D). One tensor of shape (n, 5)."""
        forecast, (y, naive) = predictions.double(), targets.double().unbind(1)
        losses, errors = self._loss(forecast, y), forecast - y
        found = (errors.square(), errors.abs(), (naive - y).square(), losses)
        return (torch.stack([torch.ones_like(y[:, 0]), *(one.mean(-1) for one in found)], -1),)

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class."""
        return counted(found[0], mask).sum(-2)

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        n, squared, absolute, naive, loss = np.moveaxis(vectors, -1, 0)
        return {
            "mse": ratio(squared, n),
            "mae": ratio(absolute, n),
            "skill": 1 - ratio(squared, naive),
            "loss": ratio(loss, n),
        }

    def undefined(self, name: str) -> str:
        """See the base class."""
        return "the naive forecast has no error" if name == "skill" else ""
