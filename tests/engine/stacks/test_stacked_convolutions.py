"""Convolutions of stacked clients, grouped and as products of unfolded inputs: what either launches and moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.engine.gradients.stacked_gradients import StackedGradients
from rayfl.examples import InputSpec
from rayfl.models.architecture import Architecture
from rayfl.models.zoo import LeafCNN, ResNet9, TwoCNN
from rayfl.params import leaves
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.elsewhere import PRETENDED, elsewhere
from tests.support.launches import Launches
from tests.support.problems import examples
from tests.support.unfolding import convolving

CLIENTS, BATCH = 3, 10
WORKS: dict[str, tuple[Architecture, InputSpec]] = {
    "two_cnn": (TwoCNN(), InputSpec("image", (1, 28, 28), 10)),
    "leaf_cnn": (LeafCNN(), InputSpec("image", (1, 28, 28), 62)),
    "resnet9": (ResNet9(norm="group"), InputSpec("image", (3, 32, 32), 10)),
}
MOST = {"two_cnn": (59, 46), "leaf_cnn": (59, 103), "resnet9": (216, 143)}
"""Launches of a stacked gradient with grouped convolutions, and MiB that it reads and writes for each client."""


def counted(name: str, unfold: bool) -> tuple[Launches, list[Tensor]]:
    """A stacked gradient, counted; and what it is."""
    architecture, spec = WORKS[name]
    network = convolving(architecture, spec, unfold)
    task = Classification(network)
    data = [examples(BATCH, spec, client) for client in range(CLIENTS)]
    trees = [dict(leaves(network.initialize(client))) for client in range(CLIENTS)]

    def loss(model: Any, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        return task.loss(model, Batch(x, y, mask))

    with elsewhere() as device:
        stack = {path: torch.stack([tree[path] for tree in trees]).to(device) for path in trees[0]}
        x, y = (torch.stack([getattr(one, part) for one in data]).to(device) for part in ("x", "y"))
        gradients = StackedGradients(loss, task)
        moved = list(network.parameter_names)
        gradients(stack, moved, None, x, y, None)  # what a network makes once, it has
        with Launches() as found:
            made = gradients(stack, moved, None, x, y, None)
        return found, [one.cpu() for one in made]


@PRETENDED
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "two_cnn" else pytest.mark.slow) for name in WORKS]
)
def test_grouped_convolutions_take_fewer_launches_and_bytes(name: str) -> None:
    grouped, expected = counted(name, unfold=False)
    products, found = counted(name, unfold=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for count in ("launches", "bytes"):
        one, other = (sum(getattr(which, count).values()) for which in (grouped, products))
        assert one < other
    mib = sum(grouped.bytes.values()) / CLIENTS / 2**20
    assert sum(grouped.launches.values()) <= MOST[name][0] and mib <= MOST[name][1]
