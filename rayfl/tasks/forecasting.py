"""The task forecasting: what follows a window of series."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from rayfl.examples import InputSpec
from rayfl.metrics import Measures, Metric
from rayfl.metrics.forecasting import MEDIAN, ForecastMeasures, by_quantile, metrics_of_quantiles
from rayfl.models.base import Network
from rayfl.tasks.base import Batch, NetworkTask, Trait
from rayfl.tasks.further_tasks import Error, ErrorLoss
from rayfl.tasks.section import TaskSection

_FEATURES: frozenset[Trait] = frozenset({"features"})


@dataclass(frozen=True)
class PinballLoss:
    """The mean over quantiles q of max(q e, (q - 1) e), e the number minus its quantile (Koenker and Bassett, 1978).

    Attributes:
        quantiles: Q of them.
    """

    quantiles: tuple[float, ...]

    def __call__(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of each number, shape (b, D), for predictions of shape (b, D Q) and targets (b, D)."""
        said = by_quantile(predictions, len(self.quantiles)).unbind(-1)
        errors = [(quantile, targets - one) for quantile, one in zip(self.quantiles, said, strict=True)]
        return torch.stack([torch.maximum(q * error, (q - 1) * error) for q, error in errors]).mean(0)


class Forecasting(NetworkTask):
    """Forecasting: predicts the numbers that follow a window; the loss is a mean over windows, series and times.

    Outputs are of shape (b, D), D = series x horizon, one series after the other; or of shape (b, D Q), where those of
    the Q quantiles of a number follow each other. Targets are of shape (b, 3, D): what followed, and what metrics alone
    read, the naive forecast and its mean absolute error in training times. Several models predict the mean of their
    forecasts, quantile by quantile. The task has one vector of features a sample, unless the network's head reads each
    series by itself.

    Quantiles are learned each by itself, so outputs may cross. Predictions are these sorted, which never makes the
    pinball loss larger (Chernozhukov, Fernandez-Val and Galichon, Econometrica 2010).

    Args:
        network: its outputs are the forecasts.
        candidates: one task per architecture, if clients may differ in it.
        spec: of the data; says whether they are scaled.
        error: the loss of one number.
    """

    name = "forecasting"
    target = "forecast"

    def __init__(
        self,
        network: Network,
        candidates: Sequence[Forecasting] = (),
        spec: InputSpec | None = None,
        error: ErrorLoss | PinballLoss | None = None,
    ) -> None:
        super().__init__(network, candidates, spec)
        self._error = ErrorLoss() if error is None else error
        self._quantiles = self._error.quantiles if isinstance(self._error, PinballLoss) else ()
        outputs = None if spec is None else spec.num_classes * max(len(self._quantiles), 1)
        whole = outputs is None or (network.head_shape[0] == outputs and len(network.head_shape) == 2)
        self.traits = _FEATURES if whole else frozenset()

    @cached_property
    def measures(self) -> Measures:
        """Returns how predictions are scored."""
        return ForecastMeasures(self._error, self.spec is not None and self.spec.scaled, self._quantiles)

    def predicted(self, outputs: Tensor) -> Tensor:
        """Returns the outputs, the quantiles of each number ascending."""
        if not self._quantiles:
            return outputs
        return by_quantile(outputs, len(self._quantiles)).sort(-1).values.flatten(-2)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the mean loss (:class:`ErrorLoss` or :class:`PinballLoss`) over windows, series and times."""
        return batch.mean(self._error(outputs, batch.y[:, 0]).mean(-1))


class ForecastingSection(TaskSection):
    """Forecasting of series from windows of them: squared, absolute, Huber or quantile loss; MSE, MAE, MASE, skill."""

    learns_from = "forecast"

    name: Literal["forecasting"] = Field("forecasting", description="What is learned.")
    loss: Error | Literal["quantile"] = Field(
        "squared", description="Of each number: squared, absolute or huber; or quantile, the pinball loss of quantiles."
    )
    delta: float = Field(1.0, gt=0, description="Error at which Huber's loss turns from squared to absolute.")
    quantiles: tuple[float, ...] = Field(
        (), description="Of loss=quantile: which quantiles of each number are forecast, ascending, 0.5 among them."
    )

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.delta != 1.0 and self.loss != "huber":
            raise ValueError("delta is for loss=huber: set that, or leave delta out")
        if (self.loss == "quantile") != bool(self.quantiles):
            raise ValueError("quantiles and loss=quantile need each other: give both, as quantiles=[0.1, 0.5, 0.9]")
        if outside := [f"{one:g}" for one in self.quantiles if not 0 < one < 1]:
            raise ValueError(f"quantiles: {', '.join(outside)} does not lie between 0 and 1")
        if pair := next(((one, other) for one, other in pairwise(self.quantiles) if one >= other), None):
            raise ValueError(f"quantiles: {pair[1]:g} comes after {pair[0]:g}: give each once, in ascending order")
        if self.quantiles and MEDIAN not in self.quantiles:
            raise ValueError("quantiles lack 0.5, the median, of which mse and mae are: add it")
        return self

    def of_model(self, spec: InputSpec) -> InputSpec:
        """See the base class; with quantiles, a model has an output for each of them."""
        if not self.quantiles:
            return super().of_model(spec)
        return replace(spec, num_classes=spec.num_classes * len(self.quantiles), quantiles=self.quantiles)

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class; the unit, which the data decide, is left out."""
        return metrics_of_quantiles(self.quantiles)

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        error = PinballLoss(self.quantiles) if self.loss == "quantile" else ErrorLoss(self.loss, self.delta)
        return lambda network, candidates: Forecasting(network, candidates, spec, error)
