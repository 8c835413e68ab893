"""SCAFFOLD on small problems, and the control variates of its clients."""

from __future__ import annotations

from typing import Any

import torch

from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, map_leaves
from tests.support.toy_networks import Quadratic, two_layers
from tests.support.toys import Toy, quadratic_clients, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(rounds=4, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1)
ONE_STEP = TRAIN.model_copy(update={"local_epochs": 1, "batch_size": None})


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, **options)


def quad(algorithm: Any, points: list[float], copies: list[int], start: float = 1.0, **train: Any) -> Toy:
    settings = {"rounds": 3, "clients_per_round": len(points), "batch_size": None, "lr": 0.1, "local_epochs": 2}
    return Toy(
        algorithm, quadratic_clients(points, copies), Quadratic(start=start), TrainConfig(**{**settings, **train})
    )


def mean(trees: list[Tree]) -> Tree:
    return map_leaves(lambda *leaves: torch.stack(leaves).mean(0), *trees)


def controls(toy: Toy, clients: range = range(4)) -> list[Tree]:
    """c_k of all clients; zero for those that never took part."""
    zero = map_leaves(torch.zeros_like, toy.server["control"])
    states = toy.states()
    return [states[client]["control"] if client in states else zero for client in clients]
