"""FLOCO+ on small random clients."""

from __future__ import annotations

from typing import Any

from algorithms.floco_plus import FlocoPlus
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

SIZES = (20, 7, 13, 20, 4, 11)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=5, lr=0.1, momentum=0.5, weight_decay=0.01
)
SIMPLEX: dict[str, Any] = {"simplex_dimension": 2, "assignment_round": 2, "radius": 0.3}


def plus(**changes: Any) -> FlocoPlus:
    return FlocoPlus(**(SIMPLEX | changes))


def toy(algorithm: Any, settings: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), settings, **options)


def simplex_of(server: Tree) -> Tree:
    return {"body": server["body"], "endpoints": server["endpoints"]}
