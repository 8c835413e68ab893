"""FedFed on clients of several sizes, in a small first stage."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.updates.settings import TrainConfig
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

SIZES = (9, 12, 1, 10)
INPUTS, CODE, HIDDEN = 5, 2, 6
TRAIN = TrainConfig(
    rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, weight_decay=0.01, momentum=0.5
)
COHORTS = ([0], [1, 2], [0, 1, 2, 3], [2], [0, 3])
SMALL: dict[str, Any] = {"distillation_rounds": 2, "code_dim": CODE, "hidden": HIDDEN, "distillation_lr": 0.02}


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(
        algorithm, options.pop("data", None) or random_clients(SIZES), options.pop("task", None) or two_layers(), train,
        **options,
    )  # fmt: skip


def first_autoencoder(toy: Toy, like: Tensor) -> dict[str, Tensor]:
    """q before round 0."""
    drawn, found = toy.context.streams.generator("init.autoencoder"), {}
    widths = {"reads": (INPUTS, HIDDEN), "encodes": (HIDDEN, 2 * CODE), "unfolds": (CODE, HIDDEN)}
    for name, (inputs, outputs) in {**widths, "writes": (HIDDEN, INPUTS)}.items():
        for kind, shape in (("matrix", (outputs, inputs)), ("offset", (outputs,))):
            values = drawn.uniform(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs), shape)
            found[f"autoencoder/{name}/{kind}"] = torch.from_numpy(values).to(like)
    return found
