"""Clients with small images most of which have no labels, and methods that learn from them in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from algorithms.base import Algorithm
from rayfl.data.federated import FederatedDataset
from rayfl.data.hidden_labels import WithHiddenLabels
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.views import Views
from rayfl.data.partitions.labelled import Labelled
from rayfl.engine.updates.settings import TrainConfig
from rayfl.examples import InputSpec
from rayfl.models.base import ClassificationModel, Network
from rayfl.randomness import RandomStreams
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import DoubleNetwork
from tests.support.toys import ListDataset, Toy

SHAPE = (1, 4, 5)
SPEC = InputSpec("image", SHAPE, 3)
SIZES = (14, 9, 17, 6)
WEAK = AugmentConfig(crop=1)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=3, lr=0.2, momentum=0.5, weight_decay=0.01
)


class FlatLayers(ClassificationModel):
    """Two linear layers on flattened images, with batch normalization and dropout between them if asked."""

    def __init__(self, normalized: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(20, 7)
        self.norm = nn.BatchNorm1d(7) if normalized else nn.Identity()
        self.drop = nn.Dropout(0.3 if normalized else 0.0)
        self.head = nn.Linear(7, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.drop(torch.relu(self.norm(self.inner(x.flatten(1)))))  # type: ignore[no-any-return]

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def flat_layers(double: bool = True, normalized: bool = False) -> Classification:
    kind = DoubleNetwork if double else Network
    return Classification(kind(lambda: FlatLayers(normalized)))


def image_clients(
    sizes: Sequence[int] = SIZES,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    public: int = 0,
    validated: bool = False,
) -> ListDataset:
    """Clients with images in [0, 1] that have the class of their brightest third; validation parts and public ones."""
    generator = torch.Generator().manual_seed(seed)

    def made(count: int) -> tuple[Tensor, Tensor]:
        y = torch.randint(3, (count,), generator=generator)
        x = 0.6 * torch.rand(count, *SHAPE, generator=generator, dtype=dtype)
        for place, label in enumerate(y.tolist()):
            x[place, :, :, label : label + 2] += 0.4
        return x, y

    clients = [made(size) for size in sizes]
    x, y = made(public)
    validation = [made(5) for _ in sizes] if validated else None
    return ListDataset(clients, 3, x, validation, public_labels=y)


def hidden(dataset: FederatedDataset, seed: int = 0, **options: Any) -> FederatedDataset:
    """A data set of whose training samples a share keep their labels."""
    return WithHiddenLabels(dataset, Labelled(**options), RandomStreams(seed))


def views_of(method: Algorithm, weak: AugmentConfig = WEAK) -> Views:
    black = np.zeros(1, np.float32)
    return Views(tuple(one.build(SPEC, black) for one in method.views(weak)))


def semi_toy(method: Algorithm, **options: Any) -> Toy:
    """The method on four clients, most of whose samples have no labels (unless other clients are given)."""
    given = {"dataset": hidden(image_clients(), share=0.3), "task": flat_layers(), "train": TRAIN, **options}
    return Toy(method, views=views_of(method) if method.views(WEAK) else None, **given)
