"""Gradients over all samples of a client, and corrections of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rayfl.engine.steps import looped
from rayfl.engine.updates.requests import GradientRequest
from rayfl.examples import Examples, InputSpec
from rayfl.models.base import Network
from rayfl.params import copy, inner_product
from rayfl.tasks.base import Batch, Task
from rayfl.tasks.classification import Classification
from tests.support.problems import CPU, Dropping, Normalized, Partly, cross_entropy, examples, request
from tests.support.toy_networks import DoubleNetwork, TwoLayers
from tests.support.toys import assert_close, assert_equal

VECTOR = InputSpec("image", (6,), 4)


def test_the_gradient_of_buffers_and_of_what_is_not_read_is_zero() -> None:
    network = Network(Normalized)
    point = network.initialize(0)
    before = copy(point)
    ask = GradientRequest(0, examples(34, VECTOR, 0), point, cross_entropy, 10, seed=0)
    found = looped.gradient(ask, Classification(network), CPU)
    assert_equal(point, before)
    assert list(found) == list(point)
    assert not found["norm.running_mean"].any()
    assert found["norm.weight"].any()
    idle = Network(Partly)
    ask = GradientRequest(0, examples(34, VECTOR, 0), idle.initialize(0), cross_entropy, 10, seed=0)
    assert not looped.gradient(ask, Classification(idle), CPU)["idle.weight"].any()


def test_the_gradient_of_a_network_with_dropout_is_reproducible() -> None:
    network = Network(Dropping)
    data, point = examples(34, VECTOR, 0), network.initialize(0)
    found = []
    for global_seed, seed in ((1, 5), (2, 5), (2, 6)):
        torch.manual_seed(global_seed)
        before = torch.random.get_rng_state()
        ask = GradientRequest(0, data, point, cross_entropy, 10, seed=seed)
        found.append(looped.gradient(ask, Classification(network), CPU))
        assert torch.equal(torch.random.get_rng_state(), before)
    assert_equal(found[0], found[1])
    assert not torch.equal(found[0]["head.weight"], found[2]["head.weight"])


def test_linear_corrections_are_exact_gradient_terms() -> None:
    """<theta, c> adds c to every gradient: the form in which methods state their corrections."""
    network = DoubleNetwork(lambda: TwoLayers(6, 9, 4))
    correction = network.initialize(3)

    def corrected(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        return task.loss(model, batch) + inner_product(model, frozen)

    data = examples(8, VECTOR, 0, torch.float64)
    start = network.initialize(0)
    options: dict[str, Any] = {"epochs": 1, "momentum": 0.0, "weight_decay": 0.0, "lr": 0.5}
    bent = looped.train(request(data, start, corrected, frozen=correction, **options), Classification(network), CPU)
    plainly = looped.train(request(data, start, **options), Classification(network), CPU)
    assert_close(bent, {name: plainly[name] - 0.5 * correction[name] for name in plainly}, 1e-15)


def test_an_update_does_not_depend_on_where_the_samples_lie() -> None:
    network = Network(lambda: TwoLayers(6, 9, 4))
    data = examples(17, VECTOR, 0)
    storage = torch.zeros(17 * 6 + 3)
    shifted = storage[3:].view(17, 6)
    shifted.copy_(data.x)
    task = Classification(network)
    one = looped.train(request(data, network.initialize(0)), task, CPU)
    other = looped.train(request(Examples(shifted, data.y), network.initialize(0)), task, CPU)
    assert_equal(one, other)
