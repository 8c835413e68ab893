"""pFedHN on small random clients."""

from __future__ import annotations

from typing import Any

from algorithms.pfedhn import PFedHN
from rayfl.engine.updates.settings import TrainConfig
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

SIZES = (9, 12, 6, 10, 7)
TRAIN = TrainConfig(rounds=3, clients_per_round=2, local_epochs=1, batch_size=4, lr=0.1, momentum=0.5)


def toy_of(task: Any = None, train: TrainConfig = TRAIN, mode: str = "looped", hosts: int = 1, **options: Any) -> Toy:
    settings = {"inner_steps": 3, "hidden": 6, "trunk_layers": 2, "server_lr": 0.05, **options}
    return Toy(PFedHN(**settings), random_clients(SIZES), task or two_layers(), train, hosts, mode)
