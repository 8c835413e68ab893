"""A client's training pass: how many steps it takes, how long a step may be, and what each epoch shows of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rayfl.engine.client import Client
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.local_settings import LocalSettings
from rayfl.engine.updates.settings import TrainConfig
from rayfl.engine.updates.trampoline import run_procedures
from rayfl.errors import MethodError
from rayfl.objectives import drawn, loss
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree, squared_norm
from rayfl.randomness import RandomStreams
from rayfl.tasks.base import Batch, Task
from tests.support.client_passes import TASK, TRAIN, clients, trained
from tests.support.problems import CPU
from tests.support.toy_networks import Quadratic
from tests.support.toys import assert_close, assert_equal, quadratic_clients

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="learning_rate"):
        trained(clients(), learning_rate=0.1)


def test_settings_are_the_configured_ones_unless_given() -> None:
    """11 samples in batches of 4, two epochs: six steps, in round 1 with the rate of round 1."""
    train = TRAIN.model_copy(update={"lr_decay": 0.5})
    configured = LocalSettings.of(train, 1, 11)
    assert (configured.steps, configured.repeats, configured.groups, configured.stream) == (6, 1, (), "")
    assert configured.rule == replace(train.rule, lr=0.05)
    assert configured.keep_optimizer is False
    given = LocalSettings.of(train, 1, 11, epochs=1, lr=0.3, momentum=0.0, weight_decay=0.2, keep_optimizer=["a"])
    assert (given.steps, given.keep_optimizer) == (3, ["a"])
    assert given.rule == replace(train.rule, lr=0.3, momentum=0.0, weight_decay=0.2)
    assert LocalSettings.of(train, 1, 11, epochs=1, steps=50).steps == 50


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"groups": {"modle": ParameterGroup(lr=0.0)}}, "groups names 'modle'"),
        ({"groups": {"model/head": ParameterGroup(lr=0.0)}}, "groups names 'model/head'"),
        ({"keep_optimizer": {"modle"}}, "keep_optimizer names 'modle'"),
    ],
)
def test_options_for_what_is_not_trained_are_refused(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(MethodError, match=f"{wrong}, .* there are 'model'"):
        trained(clients(), start={"model": TASK.network.initialize(0)}, **options)


@MODES
def test_there_is_one_draw_a_step(mode: str) -> None:
    """Lists and tensors are as good as arrays."""
    start, summed = TASK.network.initialize(0), drawn("weight") * loss()

    def found(client: Client, form: Any, more: int = 0) -> Any:
        procedure = client.train(start, summed, draw=lambda generator, n: {"weight": form(generator.random(n + more))})
        engine = Engine(TASK, CPU, EngineConfig(mode=mode))  # type: ignore[arg-type]
        return run_procedures({0: procedure}, engine)[0]

    for more in (-2, 1):
        error = found(clients()[0], np.asarray, more)
        assert isinstance(error, MethodError)
        assert "'weight'" in str(error) and "pass of 6 steps" in str(error)
    for form in (list, torch.as_tensor):
        assert_equal(found(clients()[0], form), found(clients()[0], np.asarray))


@MODES
@pytest.mark.parametrize("order", [1, -1])
def test_the_group_with_the_longest_path_counts(mode: str, order: int) -> None:
    start = {"model": TASK.network.initialize(0)}
    rules = {"model": ParameterGroup(lr=0.1), "model/head.bias": ParameterGroup(lr=0.0)}
    (found, *_) = run_procedures(
        {0: clients()[0].train(start, loss(at="model"), groups=dict(list(rules.items())[::order]))},
        Engine(TASK, CPU, EngineConfig(mode=mode)),  # type: ignore[arg-type]
    ).values()
    still = {name for name, tensor in found["model"].items() if torch.equal(tensor, start["model"][name])}
    assert still == {"head.bias"}


def on_quadratic(start: float, **train: Any) -> float:
    """Where training leads from ``start`` when the client's only sample is 0 (gradient theta, full batches)."""
    section = TrainConfig(rounds=1, batch_size=None, **train)
    client = Client(
        0, {}, quadratic_clients([0.0], [1]).load(0), Quadratic(), RoundContext(0, 1, 1, section, RandomStreams(0)), CPU
    )
    return float(trained({0: client}, start={"theta": torch.tensor([start], dtype=torch.float64)})[0]["theta"])


@pytest.mark.parametrize(
    ("samples", "epochs", "least", "steps"),
    [(11, 2, 0, 6), (11, 2, 5, 6), (11, 2, 7, 7), (3, 1, 5, 5), (3, 0, 5, 0), (0, 2, 5, 0)],
)
def test_least_number_of_local_steps(samples: int, epochs: int, least: int, steps: int) -> None:
    client = clients((samples,), local_epochs=epochs, min_local_steps=least)[0]
    assert client.num_steps() == steps
    assert clients((50,), local_epochs=epochs, min_local_steps=least)[0].num_steps(samples=samples) == steps


@MODES
@pytest.mark.parametrize(
    "form", [np.float64, lambda w: np.full(3, w), lambda w: [w] * 3], ids=["scalar", "array", "list"]
)
def test_each_client_reads_its_own_frozen_values(mode: str, form: Any) -> None:
    """NumPy's values and lists are as much a client's own as PyTorch's and Python's numbers."""
    start = TASK.network.initialize(0)

    def pulled(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        weight = sum(frozen["weight"]) / 3 if form is not np.float64 else frozen["weight"]
        loss: Tensor = task.loss(model, batch) + weight * squared_norm(model)
        return loss

    def found(form: Any) -> dict[int, Tree]:
        procedures = {
            k: client.train(start, pulled, frozen={"weight": form(0.1 * k)}) for k, client in clients().items()
        }
        return run_procedures(procedures, Engine(TASK, CPU, EngineConfig(mode=mode, width=4)))  # type: ignore[arg-type]

    plain = (lambda w: w) if form is np.float64 else lambda w: torch.full((3,), w, dtype=torch.float64)
    for client, tree in found(plain).items():
        assert_close(found(form)[client], tree, 1e-6)


@MODES
@pytest.mark.parametrize("least", [1, 7])
def test_min_local_steps_goes_on_with_a_part_of_a_further_epoch(mode: str, least: int) -> None:
    """The batches are those of a longer pass, cut off."""
    found, plain = trained(clients(min_local_steps=least), mode), trained(clients(), mode)
    for client, size in enumerate((11, 4, 23)):
        usual = 2 * -(-size // 4)
        assert_close(found[client], trained(clients(), steps=max(usual, least))[client], 1e-6)
        assert torch.equal(found[client]["head.weight"], plain[client]["head.weight"]) == (least <= usual)


@MODES
def test_max_local_steps_ends_a_pass(mode: str) -> None:
    """The batches are the first ones of the pass; who has fewer steps takes all of them."""
    found, plain = trained(clients(max_local_steps=3), mode), trained(clients(), mode)
    for client, size in enumerate((11, 4, 23)):
        usual = 2 * -(-size // 4)
        assert clients(max_local_steps=3)[client].num_steps() == min(usual, 3)
        assert_close(found[client], trained(clients(), steps=min(usual, 3))[client], 1e-6)
        assert torch.equal(found[client]["head.weight"], plain[client]["head.weight"]) == (usual <= 3)
    with pytest.raises(ValidationError, match="max_local_steps=2 is less than min_local_steps=3"):
        TrainConfig(max_local_steps=2, min_local_steps=3)


@pytest.mark.parametrize("options", [{}, {"epochs": 3, "stream": ".1"}, {"steps": 4, "repeats": 2}])
def test_batches_are_those_of_the_pass(options: dict[str, Any]) -> None:
    client, seen = clients(min_local_steps=7)[0], []

    def objective(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        seen.append(batch.x.clone())
        return task.loss(model, batch)

    (reply,) = run_procedures(
        {0: client.train(TASK.network.initialize(0), objective, **options)}, Engine(TASK, CPU, EngineConfig())
    ).values()
    assert isinstance(reply, dict)
    plan = client.batches(**options)
    assert plan.steps == len(seen)
    for index, x in zip(plan.batches(CPU), seen, strict=True):
        assert torch.equal(client.examples().x[index], x)


@MODES
def test_without_last_batches_a_pass_has_full_ones_alone(mode: str) -> None:
    """11, 4 and 23 samples in batches of 4: two, one and five steps an epoch, also where epochs are looked at."""
    who, seen = clients(drop_last=True), dict[int, int]()
    for client in who.values():
        plan = client.batches()
        assert {len(batch) for batch in plan.batches(CPU)} == {4}
        assert plan.steps == client.num_steps() == 2 * (client.num_samples // 4)

    async def look(model: Tree) -> None:
        seen[0] = seen.get(0, 0) + 1

    found = trained({0: who[0]}, mode, each_epoch=look)
    assert seen == {0: 2}
    assert_close(found[0], trained({0: who[0]}, mode)[0], 1e-6)
    assert not torch.equal(found[0]["head.weight"], trained({0: clients()[0]}, mode)[0]["head.weight"])


def test_without_shuffling_a_client_has_one_order_in_all_passes_and_rounds() -> None:
    def orders(**train: Any) -> list[list[int]]:
        found = []
        for round in (0, 1):
            client = clients(**train)[0]
            client = Client(0, {}, {"train": client.examples()}, TASK, replace(client.context, round=round), CPU)
            found += [
                row for stream in ("", ".1") for row in client.batches(stream=stream).order.reshape(2, -1).tolist()
            ]
        return found

    assert len({tuple(order) for order in orders(shuffle=False)}) == 1
    assert len({tuple(order) for order in orders()}) == 8
    other = clients(shuffle=False, sizes=(11, 11))
    assert other[0].batches().order.tolist() != other[1].batches().order.tolist()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_max_grad_norm_bounds_the_length_of_a_gradient(momentum: float) -> None:
    """Far from the optimum every gradient has the length allowed, and momentum adds these up."""
    theta, velocity, scale = 100.0, 0.0, 1 / (1 + 1e-6 / 100)
    for _ in range(3):
        velocity = momentum * velocity + 2.0 * scale
        theta -= 0.1 * velocity
    assert abs(on_quadratic(100.0, local_epochs=3, lr=0.1, momentum=momentum, max_grad_norm=2.0) - theta) < 1e-7
    near = {"local_epochs": 3, "lr": 0.1, "momentum": momentum}
    assert on_quadratic(1.5, **near, max_grad_norm=2.0) == on_quadratic(1.5, **near)


def test_max_grad_norm_leaves_weight_decay_free() -> None:
    """It limits the gradient of the loss; the decay is added after."""
    moved = on_quadratic(100.0, local_epochs=1, lr=0.1, weight_decay=0.5, max_grad_norm=2.0)
    assert abs(moved - (100 - 0.1 * (2 + 0.5 * 100))) < 1e-6
