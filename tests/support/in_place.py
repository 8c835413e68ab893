"""A toy whose clients write in place."""

from __future__ import annotations

from typing import Any

from rayfl.engine.updates.settings import TrainConfig
from tests.support.toy_networks import normalized_layers
from tests.support.toys import Toy, random_clients

TRAIN = TrainConfig(rounds=3, clients_per_round=3, local_epochs=1, batch_size=4, lr=0.1)


def toy_of(method: Any, mode: str = "looped") -> Toy:
    return Toy(method, random_clients((8, 12, 6, 10), public=5), normalized_layers(), TRAIN, mode=mode)
