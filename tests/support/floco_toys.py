"""Toys of FLOCO."""

from __future__ import annotations

from typing import Any

from algorithms.floco import Floco
from rayfl.engine.updates.settings import TrainConfig
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

SIZES = (20, 7, 13, 20, 4, 11)


def train(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "rounds": 4,
        "clients_per_round": 3,
        "local_epochs": 2,
        "batch_size": 5,
        "lr": 0.1,
        "momentum": 0.5,
        "weight_decay": 0.01,
    }
    return TrainConfig(**(values | changes))


def floco(**changes: Any) -> Floco:
    values: dict[str, Any] = {"simplex_dimension": 2, "assignment_round": 2, "radius": 0.3}
    return Floco(**(values | changes))


def toy(algorithm: Any, settings: TrainConfig | None = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), settings or train(), **options)
