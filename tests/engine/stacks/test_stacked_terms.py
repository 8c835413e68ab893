"""Steps of stacks on sums of terms: matrices on one block of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.engine.precision import arithmetic
from rayfl.engine.stacks import vectorized
from rayfl.engine.stacks.stacked_terms import StackedTerms
from rayfl.engine.stacks.step_matrices import NotLinearError, StepMatrices
from rayfl.engine.steps import looped
from rayfl.engine.updates.requests import TrainRequest
from rayfl.errors import MethodError
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.models.zoo import TwoNN
from rayfl.objectives import (
    TRAINED,
    Sum,
    constant,
    drawn,
    frozen,
    inner_product,
    line,
    loss,
    squared_cosine,
    squared_distance,
)
from rayfl.optimization.optimizers import OptimizerState, ParameterGroup, Rule
from rayfl.tasks.classification import Classification
from tests.support.elsewhere import PRETENDED, elsewhere
from tests.support.launches import Launches
from tests.support.problems import CPU, SmallCNN, cross_entropy, examples, request
from tests.support.toy_networks import DoubleNetwork
from tests.support.toys import assert_close

torch.set_num_threads(1)

IMAGE = InputSpec("image", (1, 6, 6), 4)
SIZES = (17, 3, 41, 25, 10)


def by_layer(task: Any) -> Any:
    return task.network.layers


PAIR = {"federated": 1, "local": 2}
SUMS: dict[str, tuple[Mapping[str, int] | None, Sum]] = {
    "loss": (None, loss()),
    "proximal": (None, loss() + 0.1 * squared_distance("", "received")),
    "line": (
        PAIR,
        loss(at=line("federated", "local", drawn("coefficient")))
        + 0.01 * squared_distance("federated", "received")
        + squared_cosine("federated", "local"),
    ),
    "line by layer": (
        PAIR,
        loss(at=line("federated", "local", drawn("coefficients"), groups=by_layer))
        + 2 * squared_cosine("local", "federated"),
    ),
    "two losses": (
        PAIR,
        loss(at="federated") * drawn("coefficient")
        + loss(at="local")
        + 0.3 * squared_distance("local", constant("federated")),
    ),
    "products": (
        PAIR,
        loss(at="local")
        + frozen("weight") * inner_product("federated", "own")
        + drawn("coefficient") * squared_distance("federated", "local"),
    ),
}
RULES = {
    "plain": Rule(0.05),
    "decay": Rule(0.05, weight_decay=0.01),
    "momentum": Rule(0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": Rule(0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
}


def made(network: Network, name: str, rule: Rule, dtype: torch.dtype, kept: bool = False) -> list[TrainRequest]:
    """Updates of ragged clients."""
    keys, objective = SUMS[name]
    shared, requests = network.initialize(100), []
    for k, n in enumerate(SIZES):
        one = request(
            examples(n, IMAGE, k, dtype),
            network.initialize(k) if keys is None else {key: network.initialize(k + 10 * i) for key, i in keys.items()},
            objective,
            client=k,
            frozen={"received": shared, "own": network.initialize(200 + k), "weight": 0.2},
            batch_size=8,
        )
        draws = np.random.default_rng(k)
        coefficients = {
            "coefficient": draws.random(one.plan.steps),
            "coefficients": draws.random((one.plan.steps, len(network.layers))),
        }
        groups = (("local", ParameterGroup(lr=0.02)),) if keys else ()
        requests.append(
            replace(
                one, draws=coefficients, rule=rule, groups=groups, optimizer_state=OptimizerState() if kept else None
            )
        )
    return requests


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[StepMatrices]:
    """The programs of stacks that are made from now on."""
    found: list[StepMatrices] = []

    class Noted(StackedTerms):
        def __init__(self, program: StepMatrices, *rest: Any) -> None:
            found.append(program)
            super().__init__(program, *rest)

    monkeypatch.setattr(vectorized, "StackedTerms", Noted)
    monkeypatch.setattr(vectorized, "are_products", lambda device: True)
    return found


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.two_cases
def test_stacked_steps_are_those_of_each_client(name: str, rule: Rule, programs: list[StepMatrices]) -> None:
    network = DoubleNetwork(lambda: TwoNN(hidden=(20, 20)).build(IMAGE))
    task = Classification(network)
    given, alone = (made(network, name, rule, torch.float64, kept=True) for _ in range(2))
    for _ in range(2):  # the second time from the momenta of the first
        replies = vectorized.train(given, task, CPU)
        for reply, one, own in zip(replies, alone, given, strict=True):
            assert_close(reply, looped.train(one, task, CPU), 1e-10)
            assert one.optimizer_state is not None and own.optimizer_state is not None
            assert_close(own.optimizer_state.slots, one.optimizer_state.slots, 1e-10)
            assert not one.optimizer_state.slots or own.optimizer_state.steps == one.optimizer_state.steps
    assert len(programs) == 2


@pytest.mark.parametrize("factory", [lambda: TwoNN(hidden=(20, 20)).build(IMAGE), SmallCNN])
@pytest.mark.parametrize("name", ["loss", "line"])
def test_networks_agree_in_float32(name: str, factory: Any, programs: list[StepMatrices]) -> None:
    network = Network(factory)
    task = Classification(network)
    requests = made(network, name, RULES["plain"], torch.float32)
    for reply, one in zip(vectorized.train(requests, task, CPU), requests, strict=True):
        assert_close(reply, looped.train(one, task, CPU), 1e-5)
    assert len(programs) == 1


def test_what_is_no_matrix_is_differentiated_whole(programs: list[StepMatrices]) -> None:
    network = Network(lambda: TwoNN(hidden=(20, 20)).build(IMAGE))
    task = Classification(network)
    plain = made(network, "loss", RULES["plain"], torch.float32)
    others = [
        [replace(one, objective=cross_entropy) for one in plain],
        [replace(one, max_grad_norm=1.0) for one in plain],
        [replace(one, rule=Rule(0.05, optimizer="adam")) for one in plain],
        [replace(one, rule=Rule(0.05, bounds=(-1.0, 1.0))) for one in plain],
    ]
    for requests in others:
        for reply, one in zip(vectorized.train(requests, task, CPU), requests, strict=True):
            assert_close(reply, looped.train(one, task, CPU), 1e-4)
        with pytest.raises(NotLinearError):
            StepMatrices(requests[0], task)
    assert not programs


@pytest.mark.parametrize(
    ("objective", "named"),
    [
        (loss() + squared_distance(TRAINED, "received"), "squared_distance"),
        (loss(line(TRAINED, "received", 0.5)), "line"),
    ],
    ids=["penalty", "line"],
)
@pytest.mark.parametrize("rule", [Rule(0.05), Rule(0.05, optimizer="adam")], ids=["products", "autograd"])
def test_unlike_shapes_are_refused(rule: Rule, objective: Sum, named: str, programs: list[StepMatrices]) -> None:
    network = Network(lambda: TwoNN(hidden=(20, 20)).build(IMAGE))
    task, requests = Classification(network), made(network, "proximal", rule, torch.float32)
    requests = [
        replace(one, frozen={"received": {n: leaf[:1] for n, leaf in one.trainable.items()}}, objective=objective)
        for one in requests
    ]
    for fails in (lambda: vectorized.train(requests, task, CPU), lambda: looped.train(requests[0], task, CPU)):
        with pytest.raises(MethodError, match=rf"{named}\('', 'received'\) .* has shape \(20, 36\) .* \(1, 36\)"):
            fails()
    assert not programs


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [("cpu", "float32", False), ("cuda", "float32", True), ("cuda", "bfloat16", True), ("cuda", "tf32", False)],
)
def test_steps_are_products_on_devices_that_do_not_round(device: str, precision: Any, expected: bool) -> None:
    with arithmetic(precision):
        assert vectorized.are_products(torch.device(device)) == expected


def step_of(name: str, device: torch.device, clients: int) -> Launches:
    """What one step of a stack of clients with TwoNN takes, mini-batches of 10: the third of three, less the second."""
    network = Network(lambda: TwoNN().build(InputSpec("image", (1, 28, 28), 10)))
    spec, task, counted = InputSpec("image", (1, 28, 28), 10), Classification(network), []
    keys, objective = SUMS[name]
    shared = {key: leaf.to(device) for key, leaf in network.initialize(100).items()}
    for steps in (2, 3):
        requests = []
        for k in range(clients):
            data = examples(10 * steps, spec, k)
            models = [{n: v.to(device) for n, v in network.initialize(k + i).items()} for i in (0, 50)]
            one = request(
                replace(data, x=data.x.to(device), y=data.y.to(device)),
                models[0] if keys is None else dict(zip(keys, models, strict=True)),
                objective,
                frozen={"received": shared},
                draws={"coefficient": np.full(steps, 0.25)},
                epochs=1,
                momentum=0.0,
            )
            requests.append(one)
        with Launches() as launches:
            vectorized.train(requests, task, device)
        counted.append(launches)
    few, many = counted
    found = Launches()
    for count in ("launches", "waits", "bytes"):
        getattr(found, count).update(getattr(many, count))
        getattr(found, count).subtract(getattr(few, count))
    return found


MOST = {"loss": (22, 6.0), "proximal": (22, 7.0), "line": (48, 15.0)}
"""Launches of a stacked step, and models that it reads and writes for each client."""


@PRETENDED
@pytest.mark.parametrize("name", MOST)
def test_launches_and_bytes_of_a_step(name: str) -> None:
    model, clients = 4 * 199_210, 4
    with elsewhere() as device:
        found = step_of(name, device, clients)
    launches, models = found.launches.total(), found.bytes.total() / clients / model
    assert not +found.waits
    assert launches <= MOST[name][0], found.launches
    assert models <= MOST[name][1], {n: round(b / clients / model, 2) for n, b in found.bytes.items()}
