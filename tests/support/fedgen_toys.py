"""FedGen on small random clients."""

from __future__ import annotations

from typing import Any

from algorithms.fedavg import FedAvg
from algorithms.fedgen import FedGen
from rayfl.engine.updates.settings import TrainConfig
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5)
SMALL: dict[str, Any] = {"noise_dim": 4, "generator_hidden": 6, "generator_steps": 5, "generator_lr": 0.01}


def toy_of(train: TrainConfig = TRAIN, mode: str = "looped", task: Any = None, **options: Any) -> Toy:
    return Toy(FedGen(**{**SMALL, **options}), random_clients(SIZES), task or two_layers(), train, mode=mode)


def fedavg() -> Toy:
    return Toy(FedAvg(), random_clients(SIZES), two_layers(), TRAIN)
