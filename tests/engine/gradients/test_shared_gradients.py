"""Autograd gives two parameters that a network adds, such as an LSTM's two biases, one gradient in one memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.updates.requests import ExamplePrivacy, TrainRequest
from rayfl.examples import InputSpec
from rayfl.models.zoo import CharLSTM
from rayfl.objectives import loss
from rayfl.optimization import elementwise
from rayfl.optimization.elementwise import ElementwiseOptimizer
from rayfl.optimization.optimizers import Rule
from rayfl.params import Tree, leaves, map_leaves
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.problems import CPU, examples, request

SPEC = InputSpec("tokens", (6,), 9, vocabulary=9)
NETWORK = CharLSTM(hidden=8).network(SPEC)
TASK = Classification(NETWORK)
MODES = ("looped", "vectorized")


class Overwriting(ElementwiseOptimizer):
    """Plain descent by a user who computes in the gradients' memory, as is allowed."""

    @property
    def slots(self) -> tuple[str, ...]:
        return ()

    def step(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        slots: Sequence[list[Tensor]],
        number: Tensor | None,
        lr: float,
    ) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient.mul_(lr))


def requests(rule: Rule) -> list[TrainRequest]:
    def one(client: int) -> TrainRequest:
        start = map_leaves(Tensor.double, NETWORK.initialize(client))
        return replace(request(examples(12, SPEC, client), start, client=client, epochs=2), rule=rule)

    return [one(client) for client in range(3)]


def results(given: list[TrainRequest], mode: Any) -> list[Tree]:
    found = Engine(TASK, CPU, EngineConfig(mode=mode)).execute(given)
    assert not any(isinstance(one, Exception) for one in found)
    return found


def assert_equal_trees(found: Sequence[Tree], expected: Sequence[Tree]) -> None:
    for one, other in zip(found, expected, strict=True):
        for (path, leaf), (_, right) in zip(leaves(one), leaves(other), strict=True):
            torch.testing.assert_close(leaf, right, rtol=1e-12, atol=1e-12, msg=path)


@pytest.mark.parametrize("optimizer", ["rmsprop", "adagrad", "lion", "adam", "sgd"])
def test_weight_decay_is_added_once(optimizer: Any) -> None:
    given = requests(Rule(0.01, optimizer=optimizer, weight_decay=0.1))
    looped, stacked = (results(given, mode) for mode in MODES)
    assert_equal_trees(stacked, looped)


@pytest.mark.parametrize("mode", MODES)
def test_a_users_optimizer_may_overwrite_gradients(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "ELEMENTWISE", {**elementwise.ELEMENTWISE, "overwriting": Overwriting})
    found = results(requests(Rule(0.05, optimizer="overwriting")), mode)  # type: ignore[arg-type]
    assert_equal_trees(found, results(requests(Rule(0.05)), "looped"))


@pytest.mark.parametrize("mode", MODES)
def test_a_bound_on_samples_scales_both_biases_once(mode: str) -> None:
    bound, samples = 0.05, examples(12, SPEC, 0)
    start = map_leaves(Tensor.double, NETWORK.initialize(0))
    whole = request(samples, start, client=0, epochs=1)
    one_step = whole.plan.part(0, 1)
    private = ExamplePrivacy(bound, 0.0, float(len(samples.y)), 1)
    [found] = results([replace(whole, objective=loss(), rule=Rule(1.0), private=private, plan=one_step)], mode)
    total = map_leaves(torch.zeros_like, start)
    for place in one_step.order.tolist():
        model = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
        part = Batch(samples.x[place : place + 1], samples.y[place : place + 1])
        gradients = torch.autograd.grad(TASK.loss(model, part), list(model.values()))
        norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
        assert norm > bound
        for name, gradient in zip(model, gradients, strict=True):
            total[name] += gradient * (bound / norm)
    assert_equal_trees([found], [{name: start[name] - total[name] / len(samples.y) for name in start}])
