"""Requests and models that the tests of the engines share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.updates.batches import num_steps, plan_batches
from rayfl.engine.updates.requests import TrainRequest
from rayfl.examples import Examples, InputSpec
from rayfl.models.base import ClassificationModel, Network
from rayfl.optimization.optimizers import OptimizerState, Rule
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Task
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import TwoLayers

CPU = torch.device("cpu")
VECTOR = InputSpec("image", (6,), 4)
NETWORK = Network(lambda: TwoLayers(6, 9, 4))


class SmallCNN(ClassificationModel):
    """A convolution, pooling and a linear head for (1, 6, 6)."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 5, 3, padding=1)
        self.head = nn.Linear(5 * 3 * 3, classes)

    def features(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(torch.relu(self.conv(x)), 2).flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class ColourCNN(ClassificationModel):
    """Two convolutions, pooling and a linear head for (3, 6, 6)."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 6, 3, padding=1)
        self.head = nn.Linear(6 * 3 * 3, classes)

    def features(self, x: Tensor) -> Tensor:
        maps = torch.relu(self.second(torch.relu(self.first(x))))
        return nn.functional.max_pool2d(maps, 2).flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class Normalized(ClassificationModel):
    """Batch normalization between two linear layers, on vectors of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.inner(x)))

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class Counting(Normalized):
    """Counts its steps in a buffer, in place, on vectors of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def features(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return torch.relu(self.norm(self.inner(x))) / (1 + 0.1 * self.count)


class Dropping(ClassificationModel):
    """Dropout between two linear layers, on vectors of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def features(self, x: Tensor) -> Tensor:
        return self.dropout(torch.relu(self.inner(x)))

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class Recurrent(ClassificationModel):
    """An LSTM with dropout between its layers over the entries of a vector, in both directions."""

    def __init__(self, dropout: float = 0.5, classes: int = 4) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 4, 2, batch_first=True, dropout=dropout, bidirectional=True)
        self.head = nn.Linear(8, classes)

    def features(self, x: Tensor) -> Tensor:
        return self.lstm(x[..., None])[0][:, -1]  # type: ignore[no-any-return]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class Gated(ClassificationModel):
    """A gated recurrent unit over the entries of a vector, which cannot be stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 4, batch_first=True)
        self.head = nn.Linear(4, 4)

    def features(self, x: Tensor) -> Tensor:
        return self.gru(x[..., None])[0][:, -1]  # type: ignore[no-any-return]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class SelfNormalized(ClassificationModel):
    """Dropout that keeps mean and variance of what it is given, which cannot be stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.AlphaDropout(0.5)
        self.head = nn.Linear(6, 4)

    def features(self, x: Tensor) -> Tensor:
        return self.dropout(x)  # type: ignore[no-any-return]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class Scaled(ClassificationModel):
    """A linear layer on inputs divided by a constant that is a buffer, on vectors of 6."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.head = nn.Linear(6, 4)

    def features(self, x: Tensor) -> Tensor:
        return x / self.scale

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


class Partly(ClassificationModel):
    """A linear layer, and another one that the forward pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)
        self.head = nn.Linear(6, 4)

    def features(self, x: Tensor) -> Tensor:
        return x

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def examples(samples: int, spec: InputSpec, seed: int, dtype: torch.dtype = torch.float32) -> Examples:
    """Random inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, spec.num_classes, (samples,), generator=generator)
    if spec.kind == "tokens":
        return Examples(torch.randint(0, spec.vocabulary, (samples, *spec.shape), generator=generator), y)
    x = torch.rand(samples, *spec.shape, generator=generator, dtype=dtype)
    if spec.kind == "graph":  # symmetric, and all nodes exist
        nodes = spec.shape[0]
        x[..., :nodes] = (x[..., :nodes] + x[..., :nodes].transpose(1, 2)).round()
        x[..., nodes] = 1
    return Examples(x, y)


def cross_entropy(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """The loss of the model alone."""
    loss: Tensor = task.loss(model, batch)
    return loss


def request(
    data: Examples,
    trainable: Tree,
    objective: Callable[..., Tensor] = cross_entropy,
    *,
    client: int = 0,
    frozen: Mapping[str, Any] | None = None,
    draws: Mapping[str, Any] | None = None,
    batch_size: int | None = 10,
    epochs: int = 2,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
) -> TrainRequest:
    """A local update with the usual hyper-parameters."""
    steps = num_steps(len(data), batch_size, epochs)
    plan = plan_batches(len(data), batch_size, steps, np.random.default_rng(client))
    rule = Rule(lr, momentum=momentum, weight_decay=weight_decay)
    return TrainRequest(client, data, trainable, frozen, objective, draws, plan, rule, seed=1000 + client)


def updates(count: int = 6, device: torch.device = CPU, **options: Any) -> list[TrainRequest]:
    """Local updates of clients of several sizes, with momenta that they keep."""
    made = []
    for k in range(count):
        data = examples(12 + 5 * k, VECTOR, k)
        data = Examples(data.x.to(device), data.y.to(device))
        made.append(
            replace(request(data, NETWORK.initialize(k), client=k, **options), optimizer_state=OptimizerState())
        )
    return made


def slots_of(update: TrainRequest) -> dict[str, Tensor]:
    """What the optimizer has kept of an update, by slot and path."""
    assert update.optimizer_state is not None
    return {
        f"{slot}/{path}": leaf for slot, kept in update.optimizer_state.slots.items() for path, leaf in kept.items()
    }


def engine_of(mode: str, device: torch.device = CPU, width: int = 32) -> Engine:
    """An engine for :data:`NETWORK`."""
    return Engine(Classification(NETWORK), device, EngineConfig(mode=mode, width=width))  # type: ignore[arg-type]


def with_label(wrong: int, client: int, requests: list[TrainRequest]) -> list[TrainRequest]:
    """The same updates, all labels of one client replaced."""
    data = requests[client].examples
    spoilt = replace(requests[client], examples=Examples(data.x, torch.full_like(data.y, wrong)))
    return [*requests[:client], spoilt, *requests[client + 1 :]]
