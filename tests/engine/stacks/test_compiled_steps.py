"""Steps that Inductor has compiled agree with those that are taken as they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.engine.stacks import compiled_steps, vectorized
from rayfl.engine.stacks.compiled_steps import Compiler
from rayfl.engine.steps import looped
from rayfl.engine.updates.requests import TrainRequest
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.optimization.optimizers import OptimizerState, ParameterGroup, Rule
from rayfl.tasks.base import Task
from rayfl.tasks.classification import Classification
from tests.engine.stacks.test_stacked_layers import updates_of
from tests.support.cases import ALGORITHMS, toy_of
from tests.support.compiler import NEEDS_COMPILER
from tests.support.own_models import Frozen
from tests.support.problems import (
    CPU,
    VECTOR,
    Dropping,
    Normalized,
    Partly,
    Recurrent,
    SmallCNN,
    examples,
    request,
    slots_of,
)
from tests.support.toy_networks import TwoLayers, normalized_layers, recurrent_layers
from tests.support.toys import assert_close, random_clients

pytestmark = NEEDS_COMPILER
torch.set_num_threads(1)

IMAGE = InputSpec("image", (1, 6, 6), 4)
MODELS: dict[str, tuple[Callable[[], Any], InputSpec]] = {
    "perceptron": (lambda: TwoLayers(6, 9, 4), VECTOR),
    "small_cnn": (SmallCNN, IMAGE),
    "recurrent": (Recurrent, VECTOR),
    "normalized": (Normalized, VECTOR),
    "dropping": (Dropping, VECTOR),
}
ALIKE, RAGGED = (8, 8, 7), (33, 27, 24, 9, 8, 4, 3)
METHODS = ("fedavg", "superfed-mm", "ditto", "scaffold")
QUICK = (("ditto", "two layers"), ("scaffold", "normalized"))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Traces stand for compiled programs, which would take seconds each; the list has all that were made."""
    made: list[Any] = []

    def instead(graph: Any, tensors: Any, options: Any) -> Any:
        made.append(graph)
        return graph

    monkeypatch.setattr(torch._inductor, "compile", instead)
    return made


def problem(name: str, method: str, sizes: Sequence[int] = ALIKE) -> tuple[list[TrainRequest], Task]:
    factory, spec = MODELS[name]
    network = Network(factory)
    return updates_of(network, spec, method, sizes), Classification(network)


def assert_agree(updates: Sequence[TrainRequest], task: Task, compiler: Compiler, atol: float = 1e-5) -> None:
    """Compiled steps against uncompiled ones, what the optimizers keep included."""
    others = [
        replace(
            one,
            optimizer_state=None
            if one.optimizer_state is None
            else OptimizerState(one.optimizer_state.slots, one.optimizer_state.steps),
        )
        for one in updates
    ]
    found = vectorized.train(updates, task, CPU, compiler=compiler)
    for one, expected in zip(found, vectorized.train(others, task, CPU), strict=True):
        assert_close(one, expected, atol)
    for one, other in zip(updates, others, strict=True):
        if one.optimizer_state is not None:
            assert_close(slots_of(one), slots_of(other), atol)
            assert other.optimizer_state is not None and one.optimizer_state.steps == other.optimizer_state.steps


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=() if (name, method) == ("dropping", "two losses") else pytest.mark.slow)
        for name in MODELS
        for method in ("fedavg", "superfed", "two losses")
    ],
)
@pytest.mark.slow
def test_what_inductor_compiles_agrees(name: str, method: str, caplog: pytest.LogCaptureFixture) -> None:
    updates, task = problem(name, method)
    compiler = Compiler(CPU)
    assert_agree(updates, task, compiler)
    assert_agree(updates, task, compiler)
    # One form, compiled once, with the time that it took.
    (line,) = [record.message for record in caplog.records if record.name == compiled_steps.__name__]
    assert "a step of 3 stacked clients with mini-batches of 4" in line and " s, compiled in " in line
    expected = [looped.train(one, task, CPU) for one in updates]
    for found, one in zip(vectorized.train(updates, task, CPU, compiler=compiler), expected, strict=True):
        assert_close(found, one, 1e-5)


def methods_agree(method: str, layers: str, caplog: pytest.LogCaptureFixture) -> None:
    tasks: dict[str, Callable[[], Any]] = {
        "normalized": lambda: normalized_layers(0.3),
        "recurrent": lambda: recurrent_layers(0.3),
    }
    options = {"task": tasks[layers]()} if layers in tasks else {}
    sets = {"dataset": random_clients((12, 9, 7, 12, 8), dtype=torch.float64)}
    toys = [
        toy_of(ALGORITHMS[method], mode="vectorized", compile=compiled, **sets, **options) for compiled in (False, True)
    ]
    for _ in range(2):
        assert_close(*(toy.step([0, 2, 3, 4]) for toy in toys), 1e-9)
        assert_close(*(toy.states() for toy in toys), 1e-9)
    assert "uncompiled" not in caplog.text and "failed together" not in caplog.text


@pytest.mark.parametrize(
    ("method", "layers"),
    [
        pytest.param(method, layers, marks=() if (method, layers) in QUICK else pytest.mark.slow)
        for method in METHODS
        for layers in ("two layers", "normalized", "recurrent")
    ],
)
@pytest.mark.first_case
def test_methods_agree(method: str, layers: str, traced: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    methods_agree(method, layers, caplog)
    assert traced


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["two layers", "normalized", "recurrent"])
@pytest.mark.parametrize("method", METHODS)
def test_methods_agree_compiled(method: str, layers: str, caplog: pytest.LogCaptureFixture) -> None:
    methods_agree(method, layers, caplog)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        Rule(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
        pytest.param(Rule(0.05, momentum=0.9, dampening=0.5), marks=pytest.mark.slow),
        pytest.param(Rule(0.05, weight_decay=0.1, bounds=(-0.2, 0.2)), marks=pytest.mark.slow),
        pytest.param(Rule(0.01, optimizer="adam", weight_decay=0.1), marks=pytest.mark.slow),
        pytest.param(Rule(0.01, optimizer="adamw", weight_decay=0.1), marks=pytest.mark.slow),
    ],
)
def test_every_rule_is_kept(rule: Rule, traced: list[Any]) -> None:
    updates, task = problem("perceptron", "superfed")
    groups = (("local", ParameterGroup(lr=0.02, weight_decay=0.0)),)
    updates = [
        replace(one, rule=rule, groups=groups, max_grad_norm=0.5, optimizer_state=OptimizerState()) for one in updates
    ]
    compiler = Compiler(CPU)
    for begun in (0, 4):  # the second pass goes on with what the first has left
        assert_agree([replace(one, begun=begun) for one in updates], task, compiler, 1e-6)
    # Another rate is another number that the same program reads.
    slower = [replace(one, rule=replace(rule, lr=rule.lr / 2)) for one in updates]
    assert_agree(slower, task, compiler, 1e-6)
    assert len(traced) == 1


@pytest.mark.slow
def test_where_inductor_fails_at_the_whole_step_it_compiles_the_gradient(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def failing(graph: Any, tensors: Any, options: Any) -> Any:
        asked.append(any(node.target is torch.ops.aten.copy_.default for node in graph.graph.nodes))
        if asked[-1] or len(asked) > 2:
            raise KeyError("buf98")
        return graph

    monkeypatch.setattr(torch._inductor, "compile", failing)
    updates, task = problem("perceptron", "superfed")
    compiler = Compiler(CPU)
    assert_agree(updates, task, compiler, 1e-6)
    assert_agree(updates, task, compiler, 1e-6)
    assert asked == [True, False] and "uncompiled" not in caplog.text
    # And where it fails at that too, steps are taken as they are written.
    assert_agree(updates[1:], task, compiler, 0)
    assert asked == [True, False, True, False]
    assert caplog.text.count("taken uncompiled: 'buf98'") == 1


@pytest.mark.slow
def test_few_forms_are_compiled(traced: list[Any]) -> None:
    updates, task = problem("perceptron", "fedavg", RAGGED)
    compiler = Compiler(CPU)
    assert_agree(updates, task, compiler)
    # 7, then 4, 2 and 1 clients of the stack, with the mask that short mini-batches need.
    assert [graph.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0] for graph in traced] == [7, 4, 2, 1]
    assert_agree(updates[1:], task, compiler)
    assert len(traced) == 5  # 6 clients are new


def test_what_cannot_be_traced_is_taken_as_it_is_written(caplog: pytest.LogCaptureFixture) -> None:
    def waiting(model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Tensor:
        found: Tensor = task.loss(model, batch) * float(torch.ones(3).sum())
        return found

    network, scale = Network(lambda: TwoLayers(6, 9, 4)), torch.tensor([2.0])

    def closed_over(model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Tensor:
        found: Tensor = (task.loss(model, batch) * scale).sum()
        return found

    task, compiler = Classification(network), Compiler(CPU)
    for number, objective in enumerate((waiting, closed_over), 1):
        updates = [request(examples(8, VECTOR, k), network.initialize(k), objective, client=k) for k in range(2)]
        assert_agree(updates, task, compiler, 0)
        scale += 1.0  # a program would have the value that it was made with
        assert_agree(updates, task, compiler, 0)
        assert caplog.text.count("engine.compile: stacked steps are taken uncompiled: ") == number


class Keeping(Partly):
    """Makes a constant at its first pass and keeps it outside of its buffers, as own modules may."""

    scale: Tensor | None = None

    def features(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((6,), 2.0)
        return x / self.scale


@pytest.mark.parametrize("factory", [Keeping, lambda: Frozen(VECTOR, ("project",))])
def test_tensors_outside_of_the_tree(factory: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    network, spec = Network(factory), VECTOR
    task = Classification(network)
    updates = [request(examples(8, spec, k), network.initialize(k), client=k) for k in range(2)]
    assert_agree(updates, task, Compiler(CPU), 0)
    assert "taken uncompiled: Please convert all Tensors to FakeTensors first" in caplog.text
    looped.train(updates[0], task, CPU)


def test_after_a_number_of_forms_no_other_is_compiled(
    traced: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_steps, "MAX_FORMS", 2)
    network = Network(lambda: TwoLayers(6, 9, 4))
    compiler = Compiler(CPU)
    for _ in range(4):

        def made_every_round(model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Tensor:
            found: Tensor = task.loss(model, batch)
            return found

        updates = [request(examples(8, VECTOR, k), network.initialize(k), made_every_round) for k in range(2)]
        assert_agree(updates, Classification(network), compiler)
    assert len(traced) == 2
    assert caplog.text.count("taken uncompiled: 2 forms were tried") == 1
