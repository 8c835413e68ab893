"""What the tests of methods for data that change over rounds have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.data.partitions.arriving import ClassStages
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from tests.support.partial_toys import TRAIN, labelled
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy

COHORTS = ([0, 2], [1, 2], [0, 3], [1, 2], [0, 1, 3], [2, 3])
"""Two rounds a stage; client 3 is not sampled in the first one, and client 0 not at its end."""
DATA = labelled(
    *([0, 1, 2, 0, 1, 2, 0, 1], [2, 1, 0, 0, 1, 2, 2, 1, 0, 0], [0, 1, 2, 2, 1, 0], [1, 0, 2, 1, 2, 0, 1, 2, 0])
)


def staged_toy(method: Any, memory: Any = 0, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    """The method on four clients to whom classes 0, 1 and 2 come one after another, a stage of two rounds each."""
    stages = {"stages": ClassStages(count=3, rounds=2, memory=memory), **options}
    return Toy(method, DATA, task or two_layers(), train.model_copy(update={"rounds": 6}), **stages)


def samples_of(client: int, stage: int, memory: Any = 0) -> tuple[Tensor, Tensor]:
    """What a client trains on in a stage, all that has come so far or that of the stage alone."""
    part = DATA.load(client)["train"]
    there = part.y <= stage if memory == "all" else part.y == stage
    return part.x[there], part.y[there]


def logits_of(model: Tree, x: Tensor) -> Tensor:
    """The logits of two layers."""
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    found: Tensor = hidden @ model["head.weight"].T + model["head.bias"]
    return found


def descended(
    toy: Toy, round: int, client: int, model: Tree, samples: tuple[Tensor, Tensor], value: Callable[..., Tensor]
) -> Tree:
    """A local update by PyTorch's own optimizer.

    Args:
        toy: has the random streams.
        round: t.
        client: k.
        model: where it begins.
        samples: x and y.
        value: the loss, of a model, x and y.
    """
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
    x, y = samples
    generator = toy.context.streams.generator("batches", round, client)
    for index in plan_batches(len(y), 4, 2 * -(-len(y) // 4), generator).batches(CPU):
        optimizer.zero_grad()
        value(leaves, x[index], y[index]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def cross_entropy(model: Tree, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of two layers."""
    return F.cross_entropy(logits_of(model, x), y)


def fisher_of(model: Tree, samples: tuple[Tensor, Tensor]) -> Tree:
    """The mean over samples of squared gradients of two layers' loss, one sample after the other."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    found = {name: torch.zeros_like(leaf) for name, leaf in model.items()}
    x, y = samples
    for i in range(len(y)):
        gradients = torch.autograd.grad(cross_entropy(leaves, x[i : i + 1], y[i : i + 1]), list(leaves.values()))
        for (name, total), gradient in zip(found.items(), gradients, strict=True):
            found[name] = total + gradient.square() / len(y)
    return found


def summed(one: Tree, other: Tree, factor: float) -> Tree:
    """``one + factor other``."""
    return {name: leaf + factor * other[name] for name, leaf in one.items()}
