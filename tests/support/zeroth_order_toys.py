"""Two layers whose losses are written out, and steps along directions as plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.engine.gradients.counted_normals import normals
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.02, lr_decay=0.8)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])
NAMES = ("inner.weight", "inner.bias", "head.weight", "head.bias")


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    """Four clients of several sizes with two layers in float64."""
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, **options)


def normalized_toys(algorithm: Any, mode: str) -> list[Toy]:
    """The same clients with batch normalization, without and with dropout."""
    data = random_clients(SIZES)
    return [Toy(algorithm, data, normalized_layers(dropout=share), TRAIN, mode=mode) for share in (0.0, 0.5)]


def loss(model: Tree, x: Tensor, y: Tensor) -> float:
    """The mean cross-entropy of two layers."""
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    return float(F.cross_entropy(hidden @ model["head.weight"].T + model["head.bias"], y))


def direction(key: np.ndarray, like: Tree) -> Tree:
    """The direction of a key, shape (7,): standard normal numbers."""
    numbers = normals(torch.from_numpy(key), sum(like[name].numel() for name in NAMES)).tolist()
    made, start = {}, 0
    for name in NAMES:
        stop = start + like[name].numel()
        made[name] = torch.tensor(numbers[start:stop], dtype=torch.float64).view(like[name].shape)
        start = stop
    return made


def shifted(model: Tree, along: Tree, by: float) -> Tree:
    """``model + by * along``."""
    return {name: model[name] + by * along[name] for name in NAMES}


def slope(model: Tree, along: Tree, mu: float, central: bool, x: Tensor, y: Tensor) -> float:
    """How the loss changes along a direction, from two losses."""
    if central:
        return (loss(shifted(model, along, mu), x, y) - loss(shifted(model, along, -mu), x, y)) / (2 * mu)
    return (loss(shifted(model, along, mu), x, y) - loss(model, x, y)) / mu


def batches(toy: Toy, round: int, client: int, steps: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """The mini-batches of a client's local steps; by default those of two epochs."""
    part = toy.dataset.load(client)["train"]
    generator = toy.context.streams.generator("batches", round, client)
    count = 2 * -(-len(part.y) // 4) if steps is None else steps
    return [(part.x[index], part.y[index]) for index in plan_batches(len(part.y), 4, count, generator).batches(CPU)]


def rate(round: int) -> float:
    """The learning rate of a round."""
    return TRAIN.lr * 0.8**round


def shares(cohort: Sequence[int], weights: str) -> dict[int, float]:
    """Weights of a mean over a cohort."""
    mass = {client: 1 if weights == "uniform" else SIZES[client] for client in cohort}
    return {client: mass[client] / sum(mass.values()) for client in cohort}
