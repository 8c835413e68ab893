"""A client's training pass: how many steps it takes, how long a step may be, and what each epoch shows of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from rayfl.engine.classification import Classification
from rayfl.engine.client import Client
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.local_settings import LocalSettings
from rayfl.engine.optimizers import ParameterGroup
from rayfl.engine.round_context import RoundContext
from rayfl.engine.settings import TrainConfig
from rayfl.engine.tasks import Batch, Task
from rayfl.engine.trampoline import run_procedures
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.params import Tree, squared_distance
from rayfl.randomness import RandomStreams
from tests.support.problems import CPU, Dropping, cross_entropy, examples
from tests.support.toys import Quadratic, TwoLayers, assert_close, assert_equal, quadratic_clients

SPEC = InputSpec("image", (6,), 4)
TASK = Classification(Network(lambda: TwoLayers(6, 7, 4)))
TRAIN = TrainConfig(rounds=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.01)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def clients(sizes: tuple[int, ...] = (11, 4, 23), task: Task = TASK, **train: Any) -> dict[int, Client]:
    context = RoundContext(1, 3, len(sizes), TRAIN.model_copy(update=train), RandomStreams(0))
    return {k: Client(k, {}, {"train": examples(n, SPEC, k)}, task, context, CPU) for k, n in enumerate(sizes)}


def trained(who: dict[int, Client], mode: str = "looped", start: Tree | None = None, **options: Any) -> dict[int, Tree]:
    """What ``client.train`` returns, by client."""
    task = next(iter(who.values())).task
    engine = Engine(task, CPU, EngineConfig(mode=mode, width=4))  # type: ignore[arg-type]
    start = start or task.network.initialize(0)
    found = run_procedures({k: client.train(start, cross_entropy, **options) for k, client in who.items()}, engine)
    for reply in found.values():
        if isinstance(reply, Exception):
            raise reply
    return found


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


@MODES
def test_max_grad_norm_is_each_clients_own(mode: str) -> None:
    limited = {"max_grad_norm": 0.05, "momentum": 0.0, "weight_decay": 0.0}
    start = TASK.network.initialize(0)
    for client, model in trained(clients(**limited), mode, start).items():
        steps = 2 * -(-(11, 4, 23)[client] // 4)
        assert float(squared_distance(model, start)) ** 0.5 <= 0.1 * 0.05 * steps + 1e-6
        assert_close(model, trained({client: clients(**limited)[client]}, "looped", start)[client], 1e-6)


@MODES
def test_momentum_is_kept_of_the_parts_that_are_named(mode: str) -> None:
    def both(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        return sum(cross_entropy(model[part], batch, task, frozen, draw) for part in ("kept", "fresh"))

    async def twice(client: Client) -> Tree:
        tree = {"kept": TASK.network.initialize(0), "fresh": TASK.network.initialize(1)}
        for _ in range(2):
            tree = await client.train(tree, both, keep_optimizer=("kept",))
        return tree

    async def alone(client: Client, seed: int, keep: bool) -> Tree:
        tree = TASK.network.initialize(seed)
        for _ in range(2):
            tree = await client.train(tree, cross_entropy, keep_optimizer=keep)
        return tree

    engine = Engine(TASK, CPU, EngineConfig(mode=mode, width=4))  # type: ignore[arg-type]
    who, kept = clients(persist_optimizer=True), clients()
    found = run_procedures({k: twice(client) for k, client in who.items()}, engine)
    keeping = run_procedures({k: alone(client, 0, True) for k, client in kept.items()}, engine)
    fresh = run_procedures({k: alone(client, 1, False) for k, client in clients().items()}, engine)
    for k, client in who.items():
        assert_close(found[k], {"kept": keeping[k], "fresh": fresh[k]}, 1e-6)
        assert set(client.state["optimizer"]["main"]) == {"kept"}
        assert_close(client.state["optimizer"]["main"]["kept"], kept[k].state["optimizer"]["main"], 1e-6)


@MODES
def test_momentum_is_kept_where_groups_alone_ask_for_sgd(mode: str) -> None:
    def both(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        return cross_entropy(model["a"], batch, task, None, None) + cross_entropy(model["b"], batch, task, None, None)

    async def passes(client: Client, **options: Any) -> Tree:
        tree = {"a": TASK.network.initialize(0), "b": TASK.network.initialize(1)}
        for _ in range(2):
            tree = await client.train(tree, both, keep_optimizer=True, **options)
        return tree

    group = ParameterGroup(optimizer="sgd", momentum=0.9)
    found = []
    for train, groups in (({}, None), ({"optimizer": "adam", "momentum": 0.0}, {"a": group, "b": group})):
        engine = Engine(TASK, CPU, EngineConfig(mode=mode, width=4))  # type: ignore[arg-type]
        who = clients(**train)
        found.append(run_procedures({k: passes(client, groups=groups) for k, client in who.items()}, engine))
    for client, tree in found[0].items():
        assert_equal(found[1][client], tree)


@MODES
@pytest.mark.parametrize("kept", [False, True])
def test_each_epoch_shows_the_pass_as_it_goes(mode: str, kept: bool) -> None:
    seen: dict[int, list[Tree]] = {0: [], 1: [], 2: []}
    whole, pieces = clients(), clients()
    expected = trained(whole, mode, epochs=3, keep_optimizer=kept)

    async def follow(client: Client) -> Tree:
        async def note(tree: Tree) -> None:
            seen[client.id].append(tree)

        return await client.train(
            TASK.network.initialize(0), cross_entropy, epochs=3, keep_optimizer=kept, each_epoch=note
        )

    engine = Engine(TASK, CPU, EngineConfig(mode=mode, width=4))  # type: ignore[arg-type]
    found = run_procedures({k: follow(client) for k, client in pieces.items()}, engine)
    for k, client in pieces.items():
        assert_close(found[k], expected[k], 1e-6 if mode == "vectorized" else 0)
        assert len(seen[k]) == 3
        for epoch, tree in enumerate(seen[k]):
            assert_close(tree, trained(clients(), mode, epochs=epoch + 1)[k], 1e-6 if mode == "vectorized" else 0)
        assert set(client.state) == ({"optimizer"} if kept else set())
        assert_close(client.state, whole[k].state, 1e-6 if mode == "vectorized" else 0)


def test_each_epoch_of_a_pass_with_draws_and_repeats() -> None:
    """Every step has the draw it has in one piece; an epoch counts the repetitions of its batches."""

    def objective(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        loss: Tensor = task.loss(model, batch)
        return draw["weight"] * loss

    def draw(generator: np.random.Generator, steps: int) -> Tree:
        return {"weight": generator.random(steps)}

    epochs: list[Tree] = []

    async def note(tree: Tree) -> None:
        epochs.append(tree)

    def follow(each_epoch: Any) -> Tree:
        client = clients((11,))[0]
        procedure = client.train(
            TASK.network.initialize(0), objective, draw=draw, steps=5, repeats=2, each_epoch=each_epoch
        )
        result: Tree = run_procedures({0: procedure}, Engine(TASK, CPU, EngineConfig(mode="looped")))[0]
        return result

    assert_equal(follow(note), follow(None))
    assert len(epochs) == 2
    assert not torch.equal(epochs[0]["head.weight"], epochs[1]["head.weight"])


def test_each_epoch_draws_dropout_again_and_is_not_called_without_steps() -> None:
    task = Classification(Network(Dropping))
    trees: list[Tree] = []

    async def note(tree: Tree) -> None:
        trees.append(tree)

    first = trained(clients((8,), task, local_epochs=2), each_epoch=note)
    assert_equal(first, trained(clients((8,), task, local_epochs=2)))
    assert_equal(trained(clients((8,), task, local_epochs=2), each_epoch=note), first)
    assert_equal(trees[0], trained(clients((8,), task, local_epochs=1))[0])
    assert len(trees) == 4
    assert_equal(trained(clients(local_epochs=0), each_epoch=note)[0], TASK.network.initialize(0))
    assert len(trees) == 4
