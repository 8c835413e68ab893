"""Toys of FedPHP."""

from __future__ import annotations

from typing import Any

from rayfl.engine.updates.settings import TrainConfig
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, random_clients

SIZES = (20, 13, 10, 19)  # no batch of one sample, which has no batch statistics

TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=8, lr=0.1, momentum=0.9, weight_decay=1e-3
)


def toy(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def normed() -> Classification:
    return normalized_layers(0.3)
