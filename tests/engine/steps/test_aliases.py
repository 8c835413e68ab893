"""Objectives that read a trained tensor by several names train as autograd on the whole of them does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.engine.steps import looped
from rayfl.examples import InputSpec
from rayfl.models.zoo import Architecture, CharLSTM, TwoCNN, TwoNN
from rayfl.params import Tree, inner_product, squared_distance
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support import plain
from tests.support.problems import CPU, examples, request
from tests.support.toy_networks import DoubleNetwork
from tests.support.toys import assert_close

Objective = Callable[[Any, Batch, Any, Any, Any], Tensor]


def detached(model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
    """A penalty towards the other model as it is now, which shall not be moved by it."""
    anchor = {name: leaf.detach() for name, leaf in model["second"].items()}
    value = task.loss(model["first"], batch) + 0.3 * squared_distance(model["first"], anchor)
    return value + task.loss(model["second"], batch)


def itself(model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
    """A penalty of a model towards its own values: its gradient is zero, as the values move with it."""
    value = task.loss(model["first"], batch) + task.loss(model["second"], batch)
    for leaf in model["first"].values():
        value = value + 0.5 * (leaf - leaf.detach()).square().sum() + (leaf * leaf.detach()).sum() * 0.1
    return value


def viewed(model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
    """Penalties on views: rows, transposes, flattened and expanded tensors."""
    value = task.loss(model["first"], batch) + task.loss(model["second"], batch)
    for one, other in zip(model["first"].values(), model["second"].values(), strict=True):
        value = value + 0.2 * (one.flatten()[1:] - one.view(-1)[:-1]).square().sum()
        value = value + 0.1 * (one[0].expand(3, *one.shape[1:]) - other[-1]).square().sum()
        value = value + 0.05 * (one.mT.reshape(-1) * other.reshape(-1)).sum() if one.dim() == 2 else value
    return value


def twice(model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
    """The same tensors under two names, in the loss and in penalties."""
    same = dict(model["first"])
    value = task.loss(model["first"], batch) + 0.5 * task.loss(same, batch) + task.loss(model["second"], batch)
    return value + 0.1 * inner_product(same, model["first"]) + 0.2 * squared_distance(same, model["second"])


def mixed(model: Any, batch: Batch, task: Any, frozen: Any, draw: Any) -> Tensor:
    """The loss of a model that is half trained, half held where it is."""
    held = {name: 0.5 * (leaf + leaf.detach()) for name, leaf in model["first"].items()}
    return task.loss(held, batch) + task.loss(model["second"], batch)  # type: ignore[no-any-return]


PROBLEMS: dict[str, tuple[Architecture, InputSpec]] = {
    "perceptron": (TwoNN(hidden=(7, 6)), InputSpec("image", (5,), 3)),
    "cnn": (TwoCNN(), InputSpec("image", (1, 4, 4), 3)),
    "lstm": (CharLSTM(hidden=5), InputSpec("tokens", (4,), 6, vocabulary=6)),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("objective", [detached, itself, viewed, twice, mixed])
def test_aliases_train_as_autograd_has_it(objective: Objective, problem: str) -> None:
    architecture, spec = PROBLEMS[problem]
    network = DoubleNetwork(lambda: architecture.build(spec))
    task = Classification(network)
    tree: Tree = {"first": network.initialize(1), "second": network.initialize(2)}
    for samples in (1, 7):
        update = request(
            examples(samples, spec, 3, torch.float64), tree, objective, batch_size=3, epochs=2, momentum=0.9
        )
        found = looped.train(update, task, CPU)
        assert_close(found, plain.train(update, task, CPU), 1e-12)
        assert not torch.equal(found["first"][network.head_weight], tree["first"][network.head_weight])
