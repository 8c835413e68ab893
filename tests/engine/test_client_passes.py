"""Momentum that is kept, clipped gradients, and passes that are looked at after each epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rayfl.engine.client import Client
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.updates.trampoline import run_procedures
from rayfl.errors import MethodError
from rayfl.models.base import Network
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree, leaves, squared_distance
from rayfl.tasks.base import Batch, Task
from rayfl.tasks.classification import Classification
from tests.support.client_passes import TASK, clients, trained
from tests.support.problems import CPU, Dropping, cross_entropy
from tests.support.toys import assert_close, assert_equal

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


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
def test_adam_is_kept_of_tensors_that_are_named(mode: str) -> None:
    """A model has no first keys: its parameters' names stand in their place."""
    adam = {"optimizer": "adam", "momentum": 0.0}
    names = list(TASK.network.parameter_names)

    def second(keep: Any) -> dict[int, Tree]:
        who = clients(**adam)
        trained(who, mode, keep_optimizer=keep)
        return trained(who, mode, keep_optimizer=keep)

    assert_equal(second(names)[0], second(True)[0])
    assert not torch.equal(second(False)[0]["head.weight"], second(True)[0]["head.weight"])
    with pytest.raises(MethodError, match="keep all of them"):
        second(names[:1])


@MODES
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("train", [{"optimizer": "adam", "momentum": 0.0}, {"momentum": 0.9}], ids=["adam", "sgd"])
def test_an_optimizer_is_not_that_of_other_tensors(train: dict[str, Any], keys: bool, own: bool, mode: str) -> None:
    """Head, then body: the second pass needs a stream of its own, or what is kept of the head would be lost."""
    model = TASK.network.initialize(0)
    parts = [{n: leaf for n, leaf in model.items() if n.startswith(part)} for part in ("head", "inner")]
    head, body = ({str(place): part} if keys else part for place, part in enumerate(parts))

    def objective(part: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        named = {path.rpartition("/")[2]: leaf for path, leaf in leaves({**frozen, **part})}
        return cross_entropy(named, batch, task, None, None)

    async def passes(client: Client) -> Tree:
        trained = await client.train(head, objective, frozen=body, keep_optimizer=True)
        return await client.train(body, objective, frozen=trained, keep_optimizer=True, stream=".body" if own else "")

    engine = Engine(TASK, CPU, EngineConfig(mode=mode, width=4))  # type: ignore[arg-type]
    procedures = {k: passes(client) for k, client in clients(**train).items()}
    for found in run_procedures(procedures, engine).values():
        assert isinstance(found, dict if own else MethodError)
        assert own or "stream of its own" in str(found)


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
@pytest.mark.two_cases
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


@MODES
@pytest.mark.parametrize("kept", [False, True])
def test_a_pass_ends_after_the_epoch_that_says_so(mode: str, kept: bool) -> None:
    """With what the optimizer keeps after it; each client by itself."""
    stopped = clients()

    async def follow(client: Client) -> Tree:
        epochs = 0

        async def note(tree: Tree) -> bool:
            nonlocal epochs
            epochs += 1
            return epochs == client.id + 1

        return await client.train(
            TASK.network.initialize(0), cross_entropy, epochs=3, keep_optimizer=kept, each_epoch=note
        )

    engine = Engine(TASK, CPU, EngineConfig(mode=mode, width=4))  # type: ignore[arg-type]
    found = run_procedures({k: follow(client) for k, client in stopped.items()}, engine)
    for k, client in stopped.items():
        whole = clients()
        expected = trained(whole, mode, epochs=k + 1, keep_optimizer=kept)
        assert_close(found[k], expected[k], 1e-6 if mode == "vectorized" else 0)
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
