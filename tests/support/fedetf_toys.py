"""FedETF on small clients that lack classes, and its model and loss in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from algorithms.fedetf import FedETF
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree
from tests.support.partial_toys import labelled
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy

TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
SKEWED = labelled([0, 0, 0, 0, 1, 2], [2, 2, 2, 1], [0] * 9 + [1], [0, 1, 2, 2, 2, 1, 1])
"""Clients of unequal sizes; the second and the third lack a class."""
BODY = ("inner.weight", "inner.bias")


def toy_of(algorithm: FedETF, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": SKEWED, "task": two_layers(), **options}, train=train)


class Oracle(nn.Module):
    """The model in modules of PyTorch, from the paper's formulas."""

    def __init__(self, server: Tree, dim: int) -> None:
        super().__init__()
        self.body, self.g = nn.Linear(5, 7).double(), nn.Linear(7, dim).double()
        self.body.load_state_dict({name.partition(".")[2]: leaf for name, leaf in server["shared"].items()})
        self.g.load_state_dict({"weight": server["projection"]["matrix"], "bias": server["projection"]["offset"]})
        self.beta = nn.Parameter(server["temperature"].clone())
        self.v = nn.Parameter(server["classifier"].clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        mu = self.g(self.body(x).relu())
        z: Tensor = self.beta * (mu / mu.square().sum(1, keepdim=True).sqrt()) @ self.v.T
        return z

    def tree(self) -> Tree:
        return {
            "shared": {name: leaf.detach() for name, leaf in zip(BODY, self.body.parameters(), strict=True)},
            "projection": {"matrix": self.g.weight.detach(), "offset": self.g.bias.detach()},
            "temperature": self.beta.detach(),
            "classifier": self.v.detach(),
        }


def steps(toy: Toy, model: Oracle, client: int, stream: str, epochs: int, gamma: float | None, rule: Any) -> None:
    """Steps on the balanced feature loss, or without gamma on the cross-entropy."""
    part = toy.dataset.load(client)["train"]
    n = torch.bincount(part.y, minlength=3).double()
    weights = n**gamma if gamma is not None else torch.ones(3, dtype=torch.float64)
    # personalization is part of the evaluation of the round that is over
    generator = toy.context.streams.generator(stream, toy.round - ("." in stream), client)
    for index in plan_batches(len(part), 4, epochs * -(-len(part) // 4), generator).batches(CPU):
        shares = weights * model(part.x[index]).exp()
        own = shares[torch.arange(len(index)), part.y[index]]
        rule.zero_grad()
        (-(own / shares.sum(1)).log()).mean().backward()
        rule.step()
