"""One client that fails takes no other of its stack along, and no other is blamed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from rayfl.aggregation.exact_sum import Weighted
from rayfl.config.cluster_section import ClientsConfig
from rayfl.engine.client import Client
from rayfl.engine.stacks import vectorized
from rayfl.engine.updates.requests import TrainRequest
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Task
from tests.support.problems import engine_of, updates, with_label
from tests.support.toys import assert_close, assert_equal, ragged_toy

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def test_the_client_that_a_stack_failed_because_of_is_blamed_and_no_other() -> None:
    requests = with_label(9, 3, updates())
    found, alone = engine_of("vectorized").execute(requests), engine_of("looped").execute(updates())
    for client, (one, other) in enumerate(zip(found, alone, strict=True)):
        if client == 3:
            assert isinstance(one, IndexError)
        else:
            assert_equal(one, other)


class Picking(FedAvg):
    """A method whose objective reads what an index of the client's own says, which for client 1 is out of range."""

    name: str = "picking"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        frozen = {"place": torch.tensor([9 if client.id == 1 else 2])}
        return Weighted(await client.train(model, self.picked, frozen=frozen), client.num_samples)

    def picked(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        bias = model["head.bias"].gather(0, frozen["place"])
        return task.loss(model, batch) + bias.sum()


@MODES
def test_a_bad_client_of_a_stack_is_left_out_alone(mode: str) -> None:
    own = ragged_toy(mode, algorithm=Picking(), clients_per_round="all")
    own.federation._policy = ClientsConfig(on_error="skip")
    own.federation.begin_round(0, (), range(4))
    own.federation.play(own.algorithm, own.server, range(4))
    assert list(own.federation.absent) == [1]


def test_a_stack_that_fails_as_such_is_run_one_by_one_with_one_note(caplog: pytest.LogCaptureFixture) -> None:
    def branching(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        loss: Tensor = task.loss(model, batch)
        return loss * 2 if loss > 0 else loss

    requests = updates(objective=branching)
    own = engine_of("vectorized")
    with caplog.at_level(logging.WARNING):
        found = own.execute(requests)
        own.execute(updates(objective=branching))
    for one, other in zip(found, engine_of("looped").execute(updates(objective=branching)), strict=True):
        assert_equal(one, other)
    assert caplog.text.count("6 clients failed together, but not one by one: ") == 1


@pytest.mark.parametrize("clients", [1, 6])
def test_an_objective_that_cannot_be_stacked_is_named_and_not_tried_again(
    clients: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient penalty by ``torch.autograd.grad``, which knows nothing of stacks; ``torch.func.grad`` does."""

    def penalized(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        (slope,) = torch.autograd.grad(task.loss(model, batch), [model["head.weight"]], create_graph=True)
        return task.loss(model, batch) + slope.square().sum()

    def differentiable(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        slope = torch.func.grad(lambda weight: task.loss({**model, "head.weight": weight}, batch))(model["head.weight"])
        return task.loss(model, batch) + slope.square().sum()

    stacks: list[int] = []
    train = vectorized.train

    def counting(requests: Sequence[TrainRequest], *rest: Any) -> list[Tree]:
        stacks.append(len(requests))
        return train(requests, *rest)

    monkeypatch.setattr(vectorized, "train", counting)
    own = engine_of("vectorized")
    expected = engine_of("looped").execute(updates(clients, objective=differentiable))
    for _ in range(2):
        for objective, atol in ((penalized, 1e-6), (differentiable, 1e-5)):
            for found, one in zip(own.execute(updates(clients, objective=objective)), expected, strict=True):
                assert_close(found, one, atol)
    assert stacks == [clients] * 3
    assert caplog.text.count("penalized are trained one by one from now on") == 1


def test_no_room_for_one_client_is_no_error_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    train = vectorized.train

    def small(requests: Sequence[TrainRequest], *rest: Any) -> list[Tree]:
        if any(one.client == 3 for one in requests):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(requests, *rest)

    monkeypatch.setattr(vectorized, "train", small)
    found = engine_of("vectorized").execute(updates())
    assert [isinstance(one, Exception) for one in found] == [False, False, False, True, False, False]
