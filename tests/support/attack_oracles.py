"""Attacks in plain PyTorch, sample by sample and number by number, for clients that train on what they give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.parts.adversarial import Adversarial
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, ListDataset, Toy, random_clients

SIZES = (9, 12, 1, 10)
TRAIN = TrainConfig(
    rounds=2, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
COHORTS = ([0, 2], [1, 2], [0, 1, 3])
STRONG: dict[str, Any] = {"radius": 0.2, "step": 0.08, "steps": 4}


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": two_layers(), **options}, train=train)


def skewed_clients() -> ListDataset:
    """Clients whose classes are not equally frequent: the second lacks one of three, the third has one alone."""
    generator = torch.Generator().manual_seed(5)
    labels = ([0, 0, 0, 0, 1, 2, 2], [2, 2, 2, 1, 2, 2], [1] * 5, [0, 1, 2, 2, 2, 1, 1, 1])
    made = [(torch.randn(len(y), 5, generator=generator, dtype=torch.float64), torch.tensor(y)) for y in labels]
    return ListDataset(made, 3)


class Oracle(nn.Module):
    """The model of two layers in modules of PyTorch."""

    def __init__(self, model: Tree) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 7).double(), nn.Linear(7, 3).double()
        self.load_state_dict(model)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.inner(x).relu())
        return logits


def attack(
    method: Adversarial,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    samples: Tensor,
    of: Callable[[Tensor, int], Tensor] | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Attacked samples.

    Args:
        method: whose options.
        model: that is attacked.
        x: the samples, shape (b, d).
        y: their labels.
        samples: the client's training samples.
        of: what to go uphill on, of the logits of one sample and its place; None: cross-entropy.
        starts: where to begin; None: at x.
    """
    least, most = samples.min(0).values, samples.max(0).values
    found = []
    for place, one in enumerate(x):
        moved = (x if starts is None else starts)[place].clone()
        for _ in range(method.steps):
            leaf = moved.clone().requires_grad_()
            logits = model(leaf[None])[0]
            value = of(logits, place) if of else F.cross_entropy(logits, y[place])
            (slope,) = torch.autograd.grad(value, leaf)
            for i in range(len(one)):
                unit = float(most[i] - least[i]) if method.unit == "range" else 1.0
                number = float(moved[i]) + method.step * unit * float(slope[i].sign())
                number = min(max(number, float(one[i]) - method.radius * unit), float(one[i]) + method.radius * unit)
                moved[i] = min(max(number, float(least[i])), float(most[i]))
        found.append(moved)
    return torch.stack(found)


def stepped(
    toy: Toy, server: Tree, cohort: list[int], value: Callable[[nn.Module, Tensor, Tensor, Any], Tensor]
) -> Tree:
    """The mean model after a round of local SGD.

    Args:
        toy: whose round is next, with ``TRAIN``.
        server: the model of before.
        cohort: clients.
        value: the loss of a model, inputs, labels, and the client's training samples.
    """
    sizes = {k: len(toy.dataset.load(k)["train"].y) for k in cohort}
    mean = {name: torch.zeros_like(leaf) for name, leaf in server.items()}
    for k in cohort:
        model, data = Oracle(server), toy.dataset.load(k)["train"]
        rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
        generator = toy.context.streams.generator("batches", toy.round, k)
        for index in plan_batches(sizes[k], 4, 2 * -(-sizes[k] // 4), generator).batches(CPU):
            rule.zero_grad()
            value(model, data.x[index], data.y[index], data).backward()
            rule.step()
        for name, leaf in model.state_dict().items():
            mean[name] += sizes[k] / sum(sizes.values()) * leaf
    return mean
