"""What the tests of the methods with a shared and a personal part of the model have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfl.engine.updates.settings import TrainConfig
from rayfl.metrics import Statistics
from rayfl.models.base import ClassificationModel, Network
from rayfl.params import Tree
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import DoubleNetwork, TwoLayers
from tests.support.toys import ListDataset, Toy, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0, 2], [1, 2], [0, 1], [1, 2])
"""Client 3 is never sampled."""


class ThreeLayers(ClassificationModel):
    """Two hidden layers, the second of which is part of the classifier block, and running statistics in the body."""

    classifier_modules = ("hidden", "head")

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.hidden = nn.Linear(7, 6)
        self.head = nn.Linear(6, 3)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(torch.relu(self.norm(self.inner(x)))))

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def three_layers() -> Classification:
    """ThreeLayers in float64."""
    return Classification(DoubleNetwork(ThreeLayers))


def partly_fixed(*names: str) -> Classification:
    """MLP2 in float32 of which nobody trains the named parameters."""

    def make() -> TwoLayers:
        model = TwoLayers()
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return Classification(Network(make))


def labelled(*labels: list[int], seed: int = 3) -> ListDataset:
    """Clients with random samples of the given labels."""
    generator = torch.Generator().manual_seed(seed)
    return ListDataset(
        [(torch.randn(len(y), 5, generator=generator, dtype=torch.float64), torch.tensor(y)) for y in labels]
    )


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    """The method on four small random clients."""
    return Toy(algorithm, random_clients(SIZES), task or three_layers(), train, **options)


def initial(toy: Toy) -> Tree:
    """The common initial model."""
    model: Tree = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    return model


def take(model: Mapping[str, Tensor], names: Any) -> Tree:
    """Some tensors of a model."""
    return {name: model[name] for name in names}


def loss_of(toy: Toy, model: Tree, client: int) -> float:
    """Mean cross-entropy of a model on a client's test samples, in evaluation mode."""
    test = toy.dataset.load(client)["test"]
    logits = toy.task.network.logits(model, test.x)
    return float(toy.task.cross_entropy(logits, Batch(test.x, test.y)))


def vectors(scores: Mapping[int, Mapping[str, Statistics]], row: str) -> dict[int, list[float]]:
    """A row of the results by client, to be compared to the bit."""
    return {client: rows[row].vector.tolist() for client, rows in scores.items()}


def planted_clients(own: str, clients: int = 8, samples: int = 25, inputs: int = 12, classes: int = 3) -> ListDataset:
    """Clients with a common and an own part of the rule that labels their samples; held-out samples as validation.

    The rule is the nearest of ``classes`` directions in a plane that the inputs are projected to.

    Args:
        own: ``head``: the projection is common, and which class a direction stands for is the client's own.
            ``body``: the classes are common, and the order of the inputs is the client's own. ``classes``: the rule
            is common, and a client has samples of two of the classes.
        clients: number of clients.
        samples: training samples of each client.
        inputs: dimension of the inputs.
        classes: number of classes.
    """
    generator = np.random.default_rng(5)
    projection = np.linalg.qr(generator.standard_normal((inputs, 2)))[0]
    angles = 2 * np.pi * np.arange(classes) / classes
    directions = np.stack([np.cos(angles), np.sin(angles)])
    parts: list[tuple[Tensor, Tensor]] = []
    for _ in range(clients):
        x = generator.standard_normal((8 * (samples + 300) if own == "classes" else samples + 300, inputs))
        y = (x @ projection @ directions).argmax(1)
        if own == "head":
            y = generator.permutation(classes)[y]
        elif own == "body":
            x = x[:, generator.permutation(inputs)]
        else:
            kept = np.flatnonzero(np.isin(y, generator.permutation(classes)[:2]))[: samples + 300]
            x, y = x[kept], y[kept]
        parts.append((torch.from_numpy(x), torch.from_numpy(y)))
    return ListDataset(
        [(x[:samples], y[:samples]) for x, y in parts],
        classes,
        validation=[(x[samples:], y[samples:]) for x, y in parts],
    )


def camps(clients: int = 12, samples: int = 6, inputs: int = 10) -> ListDataset:
    """Clients with few samples of overlapping classes, of which one camp has 0, 1, 2 and the other 3, 4, 5."""
    generator = torch.Generator().manual_seed(2)
    centres = 0.5 * torch.randn(6, inputs, generator=generator, dtype=torch.float64)
    seen, new = [], []
    for client in range(clients):
        for kept, n in ((seen, samples), (new, 300)):
            y = torch.randint(3, (n,), generator=generator) + 3 * (client % 2)
            kept.append((centres[y] + torch.randn(n, inputs, generator=generator, dtype=torch.float64), y))
    return ListDataset(seen, 6, validation=new)


def held_out_accuracy(toy: Toy, row: str, final: bool = False) -> float:
    """Mean over clients of the accuracy on held-out samples."""
    return float(np.mean([rows[row].top1 for rows in toy.scores(final, split="validation").values()]))
