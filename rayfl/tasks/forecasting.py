"""The task forecasting: what follows a window of series."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from rayfl.examples import InputSpec
from rayfl.metrics import Measures, Metric
from rayfl.metrics.forecasting import METRICS, ForecastMeasures
from rayfl.models.base import Network
from rayfl.tasks.base import Batch, NetworkTask, Trait
from rayfl.tasks.further_tasks import Error, ErrorLoss
from rayfl.tasks.section import TaskSection

_FEATURES: frozenset[Trait] = frozenset({"features"})


class Forecasting(NetworkTask):
    """Forecasting: predicts the numbers that follow a window; the loss is a mean over windows, series and times.

    Outputs are of shape (b, D), D = series x horizon, one series after the other. Targets are of shape (b, 2, D): what
    followed, and the naive forecast, which only metrics read. Several models predict the mean of their forecasts. The
    task has one vector of features a sample, unless the network's head reads each series by itself.

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
        error: ErrorLoss | None = None,
    ) -> None:
        super().__init__(network, candidates, spec)
        self._error = ErrorLoss() if error is None else error
        whole = spec is None or (network.head_shape[0] == spec.num_classes and len(network.head_shape) == 2)
        self.traits = _FEATURES if whole else frozenset()

    @cached_property
    def measures(self) -> Measures:
        """Returns how predictions are scored."""
        return ForecastMeasures(self._error, self.spec is not None and self.spec.scaled)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the mean :class:`ErrorLoss` over windows, series and times."""
        return batch.mean(self._error(outputs, batch.y[:, 0]).mean(-1))


class ForecastingSection(TaskSection):
    """Forecasting of series from windows of them: squared, absolute or Huber loss; MSE, MAE and skill."""

    learns_from = "forecast"

    name: Literal["forecasting"] = Field("forecasting", description="What is learned.")
    loss: Error = Field("squared", description="Of each number: squared, absolute or huber.")
    delta: float = Field(1.0, gt=0, description="Error at which Huber's loss turns from squared to absolute.")

    @model_validator(mode="after")
    def _delta_of_huber(self) -> Self:
        if self.delta != 1.0 and self.loss != "huber":
            raise ValueError("delta is for loss=huber: set that, or leave delta out")
        return self

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class; the unit, which the data decide, is left out."""
        return METRICS

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        error = ErrorLoss(self.loss, self.delta)
        return lambda network, candidates: Forecasting(network, candidates, spec, error)
