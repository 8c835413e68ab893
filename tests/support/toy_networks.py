"""Tiny networks and tasks, in float64 where exact comparisons need it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rayfl.examples import InputSpec
from rayfl.metrics import CLASSIFICATION
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.networks.perceptron import TwoNN
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification


class DoubleNetwork(Network):
    """A network whose initial parameters are float64."""

    def initialize(self, seed: int) -> dict[str, Tensor]:
        return {name: value.double() for name, value in super().initialize(seed).items()}


class SoftmaxRegression(ClassificationModel):
    """SOFTREG: one linear layer."""

    def __init__(self, inputs: int = 5, classes: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(inputs, classes)

    def features(self, x: Tensor) -> Tensor:
        return x

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class TwoLayers(ClassificationModel):
    """MLP2: two linear layers with ReLU."""

    def __init__(self, inputs: int = 5, hidden: int = 7, classes: int = 3) -> None:
        super().__init__()
        self.inner = nn.Linear(inputs, hidden)
        self.head = nn.Linear(hidden, classes)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x))

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class NormalizedLayers(ClassificationModel):
    """MLP2 with running statistics among its buffers, or without these, and with dropout if asked."""

    def __init__(self, dropout: float = 0.0, running: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7, track_running_stats=running)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(7, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.drop(torch.relu(self.norm(self.inner(x))))  # type: ignore[no-any-return]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class RecurrentLayers(ClassificationModel):
    """Two layers of an LSTM over the entries of a vector, with dropout between them if asked."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, 2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(4, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.lstm(x[..., None])[0][:, -1]  # type: ignore[no-any-return]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class QuadraticNetwork:
    """Stands in for a network: the tree is one vector ``theta``."""

    parameter_names = ("theta",)
    buffer_names: tuple[str, ...] = ()
    layers = (("theta",),)
    head_names: tuple[str, ...] = ()
    body_names = ("theta",)
    vectorizable = True
    why_not_vectorizable = ""
    stochastic = False
    batch_statistics = False
    padding = None
    rows_per_sample = 0
    draws = 0
    groups: Mapping[str, tuple[str, ...]] = {}

    def __init__(self, dimension: int, start: float) -> None:
        self._start = torch.full((dimension,), start, dtype=torch.float64)

    def initialize(self, seed: int) -> dict[str, Tensor]:
        return {"theta": self._start.clone()}

    def release(self) -> None:
        """Holds nothing."""


class Quadratic:
    """QUAD: the loss is half the squared distance of theta to the client's point."""

    def __init__(self, dimension: int = 1, start: float = 1.0) -> None:
        self.network = QuadraticNetwork(dimension, start)
        self.candidates = (self,)
        self.measures = CLASSIFICATION

    def loss(self, model: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return batch.mean(0.5 * ((model["theta"] - batch.x) ** 2).sum(-1))

    def predictions(self, models: Any, x: Tensor) -> Tensor:
        return torch.zeros(x.shape[0], 2, dtype=torch.float64)

    def score_of(self, predicted: Tensor, x: Tensor) -> Tensor:
        return predicted

    def statistics(self, predictor: Any, models: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.measures.statistics(predictor.predictions(models, x, self), y)


def softmax_regression(inputs: int = 5, classes: int = 3) -> Classification:
    """SOFTREG in float64."""
    return Classification(DoubleNetwork(lambda: SoftmaxRegression(inputs, classes)))


def two_layers(inputs: int = 5, hidden: int = 7, classes: int = 3, double: bool = True) -> Classification:
    """MLP2 in float64 (or float32)."""
    make = DoubleNetwork if double else Network
    return Classification(make(lambda: TwoLayers(inputs, hidden, classes)))


def four_layers() -> Classification:
    """Three hidden layers of 7, 6 and 5 units in float64."""
    spec = InputSpec("image", (5,), 3)
    return Classification(DoubleNetwork(lambda: TwoNN(hidden=(7, 6, 5)).build(spec)), spec=spec)


def normalized_layers(dropout: float = 0.0, running: bool = True) -> Classification:
    """MLP2 with batch normalization (and dropout) in float64."""
    return Classification(DoubleNetwork(lambda: NormalizedLayers(dropout, running)))


def recurrent_layers(dropout: float = 0.0) -> Classification:
    """An LSTM in float64."""
    return Classification(DoubleNetwork(lambda: RecurrentLayers(dropout)))
