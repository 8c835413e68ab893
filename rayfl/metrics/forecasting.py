"""Forecasts: errors, how they compare with those of a naive forecast, and what is said of quantiles."""

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
    Metric("rmse", "RMSE", "lower", digits=4),
    Metric("mase", "MASE", "lower"),
    Metric("loss", "loss", "lower", digits=4),
)
MEDIAN = 0.5
_SUMS = 7
"""Sums that all forecasts have, those of quantiles not counted."""


def by_quantile(outputs: Tensor, count: int) -> Tensor:
    """Returns outputs of shape (..., D Q), the quantiles of a number one after the other, in the shape (..., D, Q).

    Args:
        outputs: of a model, or predictions.
        count: Q.
    """
    return outputs.reshape(*outputs.shape[:-1], outputs.shape[-1] // count, count)


def interval_of(quantiles: Sequence[float]) -> tuple[int, int] | None:
    """Returns the places of the outermost two quantiles that are as far from 0 as from 1, or None.

    Args:
        quantiles: ascending.
    """
    for low, quantile in enumerate(quantiles):
        for high in range(len(quantiles) - 1, low, -1):
            if abs(quantile + quantiles[high] - 1) < 1e-9:
                return low, high
    return None


def metrics_of_quantiles(quantiles: Sequence[float]) -> tuple[Metric, ...]:
    """Returns the metrics of forecasts by quantiles, without units; coverage and width where there is an interval.

    Args:
        quantiles: ascending; none: of forecasts of one number.
    """
    if not quantiles:
        return METRICS
    places, found = interval_of(quantiles), [Metric("pinball", "pinball loss", "lower", digits=4)]
    if places is not None:
        nominal = quantiles[places[1]] - quantiles[places[0]]
        found.append(Metric("coverage", f"coverage of the {100 * nominal:.6g} % interval", "higher", ranked=False))
        found.append(Metric("width", "interval width", "lower", digits=4, ranked=False))
    return (*found, *METRICS)


class ForecastMeasures(MeasuresBySample):
    """Errors of forecasts, each a mean over windows, series and times.

    ``skill`` is 1 minus the squared errors by those of a naive forecast of the same windows (the skill score of Murphy,
    Monthly Weather Review 1988, with that as its reference): 1 is perfect, 0 as good as the naive one, and below 0
    worse. It has no unit. It is undefined where the naive forecast is perfect.

    ``rmse`` is the root of ``mse``, so that of several clients together is no mean of theirs. ``mase`` is the mean of
    absolute errors by the mean absolute error of naive forecasts of the series' training times (Hyndman and Koehler,
    International Journal of Forecasting 2006). It has no unit. Series for which that is 0 do not count.

    Of forecasts by quantiles, all these errors are those of the median. ``pinball`` is the mean over quantiles q of
    max(q e, (q - 1) e), where e is the number minus its quantile (Koenker and Bassett, Econometrica 1978). This mean is
    how GEFCom2014 scored forecasts (Hong et al., International Journal of Forecasting 2016). ``coverage`` is the share
    of numbers between the outermost two quantiles q and 1 - q, and should be 1 - 2 q. ``width`` is the mean distance of
    these two.

    Args:
        loss: of each number, given forecasts of shape (n, D), or (n, D Q), and targets of shape (n, D).
        scaled: whether the data are scaled, so that errors are in units of deviations, or their squares.
        quantiles: Q of them, ascending, with 0.5; none: a forecast is one number.
    """

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        scaled: bool = False,
        quantiles: Sequence[float] = (),
    ) -> None:
        self._loss, self._quantiles, self._interval = loss, tuple(quantiles), interval_of(quantiles)
        self.size = _SUMS if self._interval is None else _SUMS + 2
        unit = "scaled" if scaled else ""
        self.metrics = tuple(
            one if one.name in ("skill", "mase", "coverage") else replace(one, unit=unit)
            for one in metrics_of_quantiles(quantiles)
        )

    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """See the base class.

        Args:
            predictions: of shape (n, D); or (n, D Q), the quantiles of a number ascending, one after the other.
            targets: of shape (n, 3, D).

        Returns:
            One tensor of shape (n, ``size``).
        """
        forecast, (y, naive, step) = predictions.double(), targets.double().unbind(1)
        losses, further = self._loss(forecast, y), list[Tensor]()
        if self._quantiles:
            said = by_quantile(forecast, len(self._quantiles)).unbind(-1)
            forecast = said[self._quantiles.index(MEDIAN)]
            if self._interval is not None:
                low, high = (said[place] for place in self._interval)
                further = [((low <= y) & (y <= high)).double(), high - low]
        errors, known = forecast - y, step > 0
        relative = torch.where(known, errors.abs() / torch.where(known, step, 1), 0)
        found = (errors.square(), errors.abs(), (naive - y).square(), losses, relative, known.double(), *further)
        return (torch.stack([torch.ones_like(y[:, 0]), *(one.mean(-1) for one in found)], -1),)

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class."""
        return counted(found[0], mask).sum(-2)

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        n, squared, absolute, naive, loss, relative, known, *further = np.moveaxis(vectors, -1, 0)
        found = {
            "mse": ratio(squared, n),
            "mae": ratio(absolute, n),
            "rmse": np.sqrt(ratio(squared, n)),
            "mase": ratio(relative, known),
            "skill": 1 - ratio(squared, naive),
            "loss": ratio(loss, n),
        }
        if self._quantiles:
            found["pinball"] = found["loss"]
        return {**found, **{name: ratio(one, n) for name, one in zip(("coverage", "width"), further, strict=False)}}

    def undefined(self, name: str) -> str:
        """See the base class."""
        if name == "mase":
            return "no series changes in training times"
        return "the naive forecast has no error" if name == "skill" else ""
