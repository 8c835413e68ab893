"""Steps that Inductor has compiled agree with those that are taken as they are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch.fx.experimental.proxy_tensor import make_fx

import rayfl
from rayfl.engine import compiled_steps, looped, vectorized
from rayfl.engine.classification import Classification
from rayfl.engine.compiled_steps import Compiler, check_compilable
from rayfl.engine.engine import EngineConfig
from rayfl.engine.optimizers import Kept, ParameterGroup, Rule
from rayfl.engine.requests import TrainRequest
from rayfl.engine.tasks import Task
from rayfl.errors import ConfigError, MethodError, ResourceError
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.models.forward_pass import ForwardPass
from tests.engine.test_stacked_layers import updates_of
from tests.support.cases import ALGORITHMS, toy_of
from tests.support.experiments import small_experiment
from tests.support.own_models import Frozen
from tests.support.problems import (
    CPU,
    VECTOR,
    Dropping,
    Gated,
    Normalized,
    Partly,
    Recurrent,
    SmallCNN,
    cross_entropy,
    examples,
    request,
    slots_of,
)
from tests.support.toys import (
    TwoLayers,
    assert_close,
    assert_equal,
    normalized_layers,
    random_clients,
    recurrent_layers,
)

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
QUICK = (("fedavg", "recurrent"), ("scaffold", "normalized"))


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
    others = [replace(one, kept=None if one.kept is None else Kept(one.kept.slots, one.kept.steps)) for one in updates]
    found = vectorized.train(updates, task, CPU, compiler=compiler)
    for one, expected in zip(found, vectorized.train(others, task, CPU), strict=True):
        assert_close(one, expected, atol)
    for one, other in zip(updates, others, strict=True):
        if one.kept is not None:
            assert_close(slots_of(one), slots_of(other), atol)
            assert other.kept is not None and one.kept.steps == other.kept.steps


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("small_cnn", "fedavg"),
        ("dropping", "two losses"),
        *(
            pytest.param(name, method, marks=pytest.mark.slow)
            for name in MODELS
            for method in ("fedavg", "superfed", "two losses")
            if (name, method) not in (("small_cnn", "fedavg"), ("dropping", "two losses"))
        ),
    ],
)
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
        pytest.param(
            method, layers, marks=() if layers == "two layers" or (method, layers) in QUICK else pytest.mark.slow
        )
        for method in METHODS
        for layers in ("two layers", "normalized", "recurrent")
    ],
)
def test_methods_agree(method: str, layers: str, traced: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    methods_agree(method, layers, caplog)
    assert traced


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["two layers", "normalized", "recurrent"])
@pytest.mark.parametrize("method", METHODS)
def test_methods_agree_compiled(method: str, layers: str, caplog: pytest.LogCaptureFixture) -> None:
    methods_agree(method, layers, caplog)


@pytest.mark.parametrize(
    "rule",
    [
        Rule(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
        Rule(0.05, momentum=0.9, dampening=0.5),
        Rule(0.05, weight_decay=0.1, bounds=(-0.2, 0.2)),
        Rule(0.01, optimizer="adam", weight_decay=0.1),
        Rule(0.01, optimizer="adamw", weight_decay=0.1),
    ],
)
def test_every_rule_is_kept(rule: Rule, traced: list[Any]) -> None:
    updates, task = problem("perceptron", "superfed")
    groups = (("local", ParameterGroup(lr=0.02, weight_decay=0.0)),)
    updates = [replace(one, rule=rule, groups=groups, max_grad_norm=0.5, kept=Kept()) for one in updates]
    compiler = Compiler(CPU)
    for begun in (0, 4):  # the second pass goes on with what the first has left
        assert_agree([replace(one, begun=begun) for one in updates], task, compiler, 1e-6)
    # Another rate is another number that the same program reads.
    slower = [replace(one, rule=replace(rule, lr=rule.lr / 2)) for one in updates]
    assert_agree(slower, task, compiler, 1e-6)
    assert len(traced) == 1


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
    monkeypatch.setattr(compiled_steps, "_MOST", 2)
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


def test_a_write_to_what_is_only_read_is_found(caplog: pytest.LogCaptureFixture) -> None:
    def writing(model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Tensor:
        frozen["seen"].add_(1.0)
        return cross_entropy(model, batch, task, frozen, draw)

    network = Network(lambda: TwoLayers(6, 9, 4))
    updates = [
        request(examples(8, VECTOR, k), network.initialize(k), writing, client=k, frozen={"seen": torch.zeros(2)})
        for k in range(2)
    ]
    with pytest.raises(MethodError, match="writes to 'seen' of frozen in place"):
        vectorized.train(updates, Classification(network), CPU, compiler=Compiler(CPU))
    assert "taken uncompiled: the objective writes to 'frozen/seen' in place" in caplog.text


def test_random_numbers_are_one_operation_of_a_trace() -> None:
    def drawn(key: Tensor, x: Tensor) -> Tensor:
        forward_pass = ForwardPass()
        forward_pass.key = key
        forward_pass.kept(x.shape, 0.5, x)
        return x * forward_pass.kept(x.shape, 0.7, x)

    keys, x = torch.tensor([7, -(1 << 62) + 12345, 3]), torch.randn(3, 5, 6)
    stacked = torch.func.vmap(drawn)
    trace = make_fx(stacked, tracing_mode="fake")(keys, x)
    assert sum(node.target is torch.ops.rayfl.dropout_factors.default for node in trace.graph.nodes) == 2
    assert_equal({"x": trace(keys, x)}, {"x": stacked(keys, x)})
    assert_equal({"x": stacked(keys, x)[1]}, {"x": drawn(keys[1], x[1])})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "looped"}, "engine.compile compiles the steps of stacked clients: set engine.mode=vectorized"),
        ({"capture": True}, "engine.compile and engine.capture do not go together"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(compile=True, **options)
    assert EngineConfig(compile=True).stacked and not EngineConfig().stacked


def test_networks_that_cannot_be_stacked_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.compile: stacked clients alone are compiled, but .*GRU"):
        check_compilable(Classification(Network(Gated)))


@pytest.mark.parametrize("checkpointing", [False, "auto"])
def test_steps_over_a_pretrained_base_are_refused(checkpointing: Any) -> None:
    from tests.support.bases import network

    with pytest.raises(ConfigError, match=r"engine\.compile: steps over a pretrained base cannot be compiled"):
        check_compilable(Classification(network("vit", checkpointing=checkpointing)))


def test_without_a_compiler_no_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor.cpp, "cxx", (None, "no-such-compiler"))
    config = small_experiment(tmp_path, "uncompiled", "fedavg") | {"engine": {"compile": True}}
    with pytest.raises(ResourceError, match=r"has no no-such-compiler on its PATH: install one \(such as g\+\+\)"):
        rayfl.run(config)
    assert not list(tmp_path.glob("uncompiled/commits/*"))
