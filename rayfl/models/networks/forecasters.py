"""Models that forecast series: linear maps of windows, and an LSTM."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rayfl.examples import InputSpec
from rayfl.models.architecture import NAME, Architecture
from rayfl.models.base import ClassificationModel
from rayfl.models.factorization import Factorizable

INDIVIDUAL = "Whether each series that is forecast has a linear map of its own; else they share one."
_WINDOWS = "windows of series (dataset=series, task=forecasting)"
_ALONE = (
    "windows whose series are all forecast, for it forecasts each from its own past (leave out dataset.covariates and "
    "calendar, or choose lstm_forecaster)"
)


def check_windows(model: Architecture, spec: InputSpec, alone: bool) -> None:
    """Refuses inputs that are no windows of series.

    Args:
        model: for messages.
        spec: of the data.
        alone: whether the model forecasts each series from its own past, and reads no others.

    Raises:
        ModelError: they are none, or have series that the model would not read.
    """
    if not spec.horizon:
        raise model.misfit(spec, _WINDOWS)
    if alone and spec.forecast_series != spec.shape[0]:
        raise model.misfit(spec, _ALONE)


class DLinear(Architecture):
    """DLinear (Zeng et al., AAAI 2023): a window is its moving average, the trend, and the rest; a linear map of each.

    The moving average of a time is over ``kernel`` times around it, where the first and the last value stand for what
    lies beyond them. Each series is forecast from its own past. The two maps are one layer, the head, which reads the
    rest and then the trend; their two biases are one. Initial weights are those of two layers. There is nothing but the
    head, so that methods which keep the head at the client train at each client alone.
    """

    name: Literal["dlinear"] = Field(default="dlinear", description=NAME)
    kernel: int = Field(default=25, ge=1, description="Times of the moving average, an odd number.")
    individual: bool = Field(default=False, description=INDIVIDUAL)

    @model_validator(mode="after")
    def _centered(self) -> Self:
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel} has no time in its middle: make it odd")
        return self

    def build(self, spec: InputSpec) -> ClassificationModel:
        check_windows(self, spec, alone=True)
        return DecomposedLinear(spec, self.kernel, self.individual)


class NLinear(Architecture):
    """NLinear (Zeng et al., AAAI 2023): a linear map of a window minus its last value, which is then added.

    Each series is forecast from its own past. The head is the linear map.
    """

    name: Literal["nlinear"] = Field(default="nlinear", description=NAME)
    individual: bool = Field(default=False, description=INDIVIDUAL)

    def build(self, spec: InputSpec) -> ClassificationModel:
        check_windows(self, spec, alone=True)
        return DifferenceLinear(spec, self.individual)


class LSTMForecaster(Factorizable):
    """An LSTM that reads all series of a window, time after time, and a linear layer on its last hidden state.

    The features are that state, and the classifier block is the head. All times are forecast at once.
    """

    name: Literal["lstm_forecaster"] = Field(default="lstm_forecaster", description=NAME)
    hidden: int = Field(default=64, ge=1, description="Units of each LSTM layer.")
    layers: int = Field(default=1, ge=1, description="Number of stacked LSTM layers.")

    def build(self, spec: InputSpec) -> ClassificationModel:
        check_windows(self, spec, alone=False)
        return RecurrentForecaster(spec, self.hidden, self.layers)


class EachSeries(nn.Module):
    """A linear layer of its own for each series.

    Args:
        series: k.
        inputs: numbers that it reads of a series.
        outputs: numbers of a series that it returns.
    """

    def __init__(self, series: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(series, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(series, outputs))
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -(inputs**-0.5), inputs**-0.5)  # as those of nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """Maps (b, k, inputs) to (b, k, outputs)."""
        return torch.einsum("bkf,khf->bkh", x, self.weight) + self.bias


class EachAlone(ClassificationModel):
    """A model that forecasts each series from its own past.

    Features are of shape (b, f) if there is one series, else (b, k, f). Outputs are of shape (b, k x h), where h is the
    horizon, times the number of quantiles if these are asked for.

    Args:
        spec: of windows.
        read: numbers that the head reads of a series.
        individual: whether it has weights for each series.
    """

    def __init__(self, spec: InputSpec, read: int, individual: bool) -> None:
        super().__init__()
        self.series = spec.forecast_series
        own, outputs = individual and self.series > 1, spec.num_classes // self.series
        self.head = EachSeries(self.series, read, outputs) if own else nn.Linear(read, outputs)

    def features(self, x: Tensor) -> Tensor:
        found = self.of_series(x[:, :, 0])
        return found[:, 0] if self.series == 1 else found

    @abstractmethod
    def of_series(self, x: Tensor) -> Tensor:
        """Returns features of shape (b, k, f) of windows of shape (b, k, times)."""

    def classify(self, features: Tensor) -> Tensor:
        return self.forecast(features).flatten(1)

    def forecast(self, features: Tensor) -> Tensor:
        """Returns forecasts of shape (b, h) or (b, k, h) for features."""
        found: Tensor = self.head(features)
        return found


class DecomposedLinear(EachAlone):
    """See :class:`DLinear`; the features of a series are the rest and the trend, 2 x times numbers.

    Args:
        spec: of windows.
        kernel: times of the moving average.
        individual: whether each series has maps of its own.
    """

    averages: Tensor

    def __init__(self, spec: InputSpec, kernel: int, individual: bool) -> None:
        times = spec.shape[-1]
        super().__init__(spec, 2 * times, individual)
        for parameter in self.head.parameters():
            nn.init.uniform_(parameter, -(times**-0.5), times**-0.5)
        around = torch.arange(times)[:, None] + torch.arange(kernel) - kernel // 2
        averages = torch.zeros(times, times).scatter_add_(
            1, around.clamp(0, times - 1), torch.full((times, kernel), 1 / kernel)
        )
        self.register_buffer("averages", averages.T.contiguous(), persistent=False)

    def of_series(self, x: Tensor) -> Tensor:
        trend = x @ self.averages.to(x.dtype)
        return torch.cat([x - trend, trend], -1)


class DifferenceLinear(EachAlone):
    """See :class:`NLinear`; the features of a series are its differences from the last value, and this.

    Args:
        spec: of windows.
        individual: whether each series has a map of its own.
    """

    def __init__(self, spec: InputSpec, individual: bool) -> None:
        super().__init__(spec, spec.shape[-1], individual)

    def of_series(self, x: Tensor) -> Tensor:
        last = x[..., -1:]
        return torch.cat([x - last, last], -1)

    def forecast(self, features: Tensor) -> Tensor:
        return super().forecast(features[..., :-1]) + features[..., -1:]


class RecurrentForecaster(ClassificationModel):
    """See :class:`LSTMForecaster`.

    Args:
        spec: of windows.
        hidden: units of a layer.
        layers: how many there are.
    """

    def __init__(self, spec: InputSpec, hidden: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(spec.shape[0], hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, spec.num_classes)

    def features(self, x: Tensor) -> Tensor:
        steps: Tensor = self.lstm(x[:, :, 0].transpose(1, 2))[0]
        return steps[:, -1]

    def classify(self, features: Tensor) -> Tensor:
        found: Tensor = self.head(features)
        return found
