"""Rounds of clients that train cut-out networks of two layers, written with PyTorch and loops alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, random_clients

SIZES = (9, 12, 1, 10, 7)
COHORTS = ([0], [1, 2], [0, 1, 2, 3, 4], [4], [2, 3])
HIDDEN = 7
TRAIN = TrainConfig(
    rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, lr_decay=0.9, momentum=0.5, weight_decay=0.01
)

Loss = Callable[[Tree, Tensor, Tensor, int, int], Tensor]
"""Of a cut-out network on a mini-batch: its tensors, inputs, labels, the client, and which step it is."""


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, **options)


def logits_of(small: Tree, x: Tensor, divisor: float = 1.0) -> Tensor:
    """Of a cut-out network whose hidden outputs are divided."""
    hidden = (x @ small["inner.weight"].T + small["inner.bias"]) / divisor
    return torch.relu(hidden) @ small["head.weight"].T + small["head.bias"]


def cut_out(model: Tree, units: list[int]) -> Tree:
    """The cut-out network with some hidden units, in this order."""
    return {
        "inner.weight": model["inner.weight"][units].clone(),
        "inner.bias": model["inner.bias"][units].clone(),
        "head.weight": model["head.weight"][:, units].clone(),
        "head.bias": model["head.bias"].clone(),
    }


def trained(toy: Toy, small: Tree, client: int, round: int, loss: Loss) -> Tree:
    """Plain SGD on the tensors of the cut-out network alone."""
    part, train, n = toy.dataset.load(client)["train"], toy.train, SIZES[client]
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in small.items()}
    optimizer = torch.optim.SGD(
        leaves.values(), lr=0.1 * 0.9**round, momentum=train.momentum, weight_decay=train.weight_decay
    )
    plan = plan_batches(n, 4, 2 * -(-n // 4), toy.context.streams.generator("batches", round, client))
    for step, index in enumerate(plan.batches(CPU)):
        optimizer.zero_grad()
        loss(leaves, part.x[index], part.y[index], client, step).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def expected_round(
    toy: Toy,
    model: Tree,
    cohort: Sequence[int],
    round: int,
    units: Callable[[int], list[int]],
    loss: Loss,
    classes: Callable[[int], Sequence[int]] = lambda client: range(3),
    uniform: bool = False,
) -> Tree:
    """The server's model after a round, element by element.

    Args:
        toy: gives samples, streams and settings.
        model: before it.
        cohort: who takes part.
        round: 0-indexed.
        units: of a client.
        loss: of a client.
        classes: whose rows of the last layer a client's count for.
        uniform: whether all clients weigh the same.
    """
    sums = {name: torch.zeros_like(leaf) for name, leaf in model.items()}
    weights = {name: torch.zeros_like(leaf) for name, leaf in model.items()}
    for client in cohort:
        q, own = 1 if uniform else SIZES[client], units(client)
        small = trained(toy, cut_out(model, own), client, round, loss)
        for place, unit in enumerate(own):
            for name in ("inner.weight", "inner.bias"):
                sums[name][unit] += q * small[name][place]
                weights[name][unit] += q
            for c in classes(client):
                sums["head.weight"][c, unit] += q * small["head.weight"][c, place]
                weights["head.weight"][c, unit] += q
        for c in classes(client):
            sums["head.bias"][c] += q * small["head.bias"][c]
            weights["head.bias"][c] += q
    return {
        name: torch.where(weights[name] > 0, sums[name] / weights[name].clamp(min=1), leaf)
        for name, leaf in model.items()
    }
