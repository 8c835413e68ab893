"""Local updates written with PyTorch alone, for tests that compare rounds with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.engine.updates.batches import plan_batches
from rayfl.params import Tree
from tests.support.toys import CPU, Toy


def steps(toy: Toy, model: Tree, client: int, round: int) -> Tree:
    """A client's local update of two layers by plain SGD: mini-batches of 4, two epochs, rate 0.1, decay 0.9.

    Args:
        toy: gives the samples, the random streams, momentum and weight decay.
        model: where it begins, left as it is.
        client: who trains.
        round: 0-indexed.
    """
    part, train = toy.dataset.load(client)["train"], toy.train
    generator = toy.context.streams.generator("batches", round, client)
    plan = plan_batches(len(part.y), 4, 2 * -(-len(part.y) // 4), generator)
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    optimizer = torch.optim.SGD(
        leaves.values(), lr=0.1 * 0.9**round, momentum=train.momentum, weight_decay=train.weight_decay
    )
    for index in plan.batches(CPU):
        optimizer.zero_grad()
        hidden = torch.relu(part.x[index] @ leaves["inner.weight"].T + leaves["inner.bias"])
        F.cross_entropy(hidden @ leaves["head.weight"].T + leaves["head.bias"], part.y[index]).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def slopes(network: Any, x: Tree, inputs: Tensor, labels: Tensor) -> Tree:
    """The gradient of the mean cross-entropy at a model x."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in x.items()}
    loss = F.cross_entropy(network.logits(leaves, inputs), labels)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def length(tree: Tree) -> Tensor:
    """The norm of all leaves as one vector."""
    return torch.cat([leaf.flatten() for leaf in tree.values()]).norm()
