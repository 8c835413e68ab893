"""Which clients are stacked together, and how many steps and different shapes that takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.fedavg import FedAvg
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.stacks import vectorized
from rayfl.engine.stacks.vectorized import bucket
from rayfl.engine.updates.requests import TrainRequest
from rayfl.engine.updates.settings import TrainConfig
from rayfl.optimization.optimizers import OptimizerState, Rule
from rayfl.params import Tree
from rayfl.tasks.classification import Classification
from tests.support.problems import NETWORK, VECTOR, engine_of, examples, request, slots_of, updates
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, random_clients

GENERATOR = np.random.default_rng(0)
SIZES = {
    "uniform": (GENERATOR.integers(3, 201, 1000), 351),
    "heavy tail": (np.clip(GENERATOR.lognormal(np.log(40), 1.2, 1000).astype(int), 3, 2000), 342),
}
"""Samples of 1,000 clients, and the steps of stacks of 32 in a pass with mini-batches of 10."""


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps of every stack that is trained from now on; none of them is taken."""
    steps: list[int] = []

    def train(requests: Sequence[TrainRequest], *_: Any) -> list[Tree]:
        steps.append(max(one.plan.steps for one in requests))
        return [one.trainable for one in requests]

    monkeypatch.setattr(vectorized, "train", train)
    return steps


@pytest.mark.parametrize(("sizes", "expected"), SIZES.values(), ids=SIZES.keys())
@pytest.mark.first_case
def test_a_host_stacks_clients_with_as_many_steps(
    sizes: np.ndarray, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = counted(monkeypatch)
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=1, batch_size=10, lr=0.1)
    toy = Toy(FedAvg(), random_clients(sizes.tolist()), two_layers(), train, mode="vectorized")
    toy.client_hosts[0].engine.width = 32
    toy.step()
    assert len(steps) == 32
    assert sum(steps) == expected


def test_an_engine_stacks_updates_with_as_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = counted(monkeypatch)
    requests = [request(examples(n, VECTOR, k), NETWORK.initialize(0), epochs=1) for k, n in enumerate((5, 90, 8, 95))]
    replies = engine_of("vectorized", width=2).execute(requests)
    assert steps == [10, 1]
    assert all(reply is one.trainable for reply, one in zip(replies, requests, strict=True))


def test_results_of_stacked_clients_come_in_the_order_they_were_asked_for() -> None:
    sizes, train = [4, 30, 9, 12], TrainConfig(rounds=1, clients_per_round="all", local_epochs=1, batch_size=5, lr=0.1)
    found = {}
    for mode in ("looped", "vectorized"):
        toy = Toy(FedAvg(), random_clients(sizes), two_layers(), train, mode=mode)
        toy.step()
        found[mode] = list(toy.federation.trained_scores)
    assert found["vectorized"] == found["looped"] == [0, 1, 2, 3]


@pytest.mark.parametrize("sizes", [[17, 3, 12, 9, 8, 0], [0, 17, 3, 12, 9, 8], [4, 4, 0, 4, 4, 4]])
def test_a_client_without_samples_is_stacked_too(sizes: list[int], caplog: pytest.LogCaptureFixture) -> None:
    train = TrainConfig(rounds=1, clients_per_round="all", local_epochs=2, batch_size=5, lr=0.1)
    looped, stacked = (
        Toy(FedAvg(aggregation="uniform"), random_clients(sizes), two_layers(), train, mode=mode).step()
        for mode in ("looped", "vectorized")
    )
    assert_close(stacked, looped, 1e-12)
    # on a GPU an index out of range would have ended the process
    assert "failed together" not in caplog.text


def test_buckets() -> None:
    assert [bucket(n) for n in range(1, 14)] == [1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 12, 12, 16]
    for n in range(1, 3000):
        assert n <= bucket(n) < 1.5 * n
    assert len({bucket(n) for n in range(1, 1001)}) == 20


@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.0}])
def test_stacks_of_ragged_clients_have_few_shapes(optimizer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has finished is stepped on without trace, until the next smaller bucket suffices."""
    stepped: list[int] = []
    move = Rule.step

    def step(self: Rule, stacks: list[torch.Tensor], gradients: list[torch.Tensor], *given: Any) -> None:
        stepped.append(len(stacks[0]))
        assert all(gradient.isfinite().all() for gradient in gradients)
        move(self, stacks, gradients, *given)

    given, expected = updates(11, **optimizer), updates(11, **optimizer)
    stacked = Engine(Classification(NETWORK), torch.device("cpu"), EngineConfig(mode="vectorized"))
    alone = engine_of("looped").execute(expected)
    with monkeypatch.context() as patched:
        patched.setattr(Rule, "step", step)
        replies = stacked.execute(given)
    for reply, other in zip(replies, alone, strict=True):
        assert_close(reply, other, 1e-5)
    assert set(stepped) == {11, 8, 6, 3, 1}
    for one, other in zip(given, expected, strict=True):
        assert_close(slots_of(one), slots_of(other), 1e-5)
        assert isinstance(one.optimizer_state, OptimizerState) and isinstance(other.optimizer_state, OptimizerState)
        assert not one.optimizer_state.slots or one.optimizer_state.steps == other.optimizer_state.steps
