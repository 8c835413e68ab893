"""Traces of stacked gradients: the bits of what is traced, once for each shape; compiled, the same up to rounding."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import cpp_builder

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.engine import vectorized
from rayfl.engine.compiled import Compiler
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.requests import TrainRequest
from rayfl.engine.tasks import Classification
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from tests.engine.test_stacked_layers import updates_of
from tests.support.problems import CPU, VECTOR, Dropping, Normalized, Recurrent, SmallCNN, examples, request
from tests.support.toys import assert_close, assert_equal

torch.set_num_threads(1)

IMAGE = InputSpec("image", (1, 6, 6), 4)


class Traces:
    """Stands in for a compiler: runs traces as they are."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, trace: Any, inputs: Sequence[Tensor]) -> Any:
        self.shapes.append(tuple(inputs[0].shape))
        assert not {"alias", "detach"} & {str(node.target).split(".")[1] for node in trace.graph.nodes if node.args}
        return trace


@pytest.mark.parametrize(
    ("factory", "spec", "method", "products"),
    [
        (SmallCNN, IMAGE, "superfed", True),
        (SmallCNN, IMAGE, "two losses", True),
        (Normalized, VECTOR, "superfed", False),
        (Dropping, VECTOR, "two losses", False),
        (Dropping, VECTOR, "two losses", True),
        (Dropping, VECTOR, "superfed", True),
        pytest.param(Recurrent, VECTOR, "superfed", True, marks=pytest.mark.slow),
    ],
)
def test_traces_have_the_bits_of_what_is_traced(
    factory: Any, spec: InputSpec, method: str, products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectorized, "are_products", lambda device: products)
    network, traces = Network(factory), Traces()
    task, compiler = Classification(network), Compiler(traces)
    for _ in range(2):  # the second time by the traces of the first
        updates = updates_of(network, spec, method, (9, 4, 6))
        expected = vectorized.train(updates, task, CPU)
        for found, one in zip(vectorized.train(updates, task, CPU, None, compiler), expected, strict=True):
            assert_equal(found, one)
        assert len(traces.shapes) <= 2 * 2  # two numbers of clients, and at most two losses
    assert bool(traces.shapes) != (products and factory is Dropping and method == "two losses")


def test_each_shape_and_objective_is_traced_once() -> None:
    network, traces = Network(SmallCNN), Traces()
    task, compiler = Classification(network), Compiler(traces)

    def updates(sizes: Sequence[int], **options: Any) -> list[TrainRequest]:
        return [request(examples(n, IMAGE, k), network.initialize(k), client=k, **options) for k, n in enumerate(sizes)]

    def halved(model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Tensor:
        found: Tensor = task.loss(model, batch) * frozen["weight"]
        return found

    for sizes in ((20, 20), (20, 20), (20, 20, 20)):
        vectorized.train(updates(sizes), task, CPU, None, compiler)
    assert [shape[0] for shape in traces.shapes] == [2, 3]
    weights = (0.5, 0.25, 0.5)
    found = [
        vectorized.train(updates((20, 20), objective=halved, frozen={"weight": weight}), task, CPU, None, compiler)[0]
        for weight in weights
    ]
    assert len(traces.shapes) == 4
    assert_equal(found[0], found[2])
    assert not torch.equal(found[0]["head.weight"], found[1]["head.weight"])


def test_what_cannot_be_compiled_runs_as_it_is_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def refusing(trace: Any, inputs: Any) -> Any:
        raise NotImplementedError("no code for this")

    network = Network(SmallCNN)
    task, compiler = Classification(network), Compiler(refusing)
    for sizes in ((20, 20), (20, 20, 20)):
        updates = [request(examples(n, IMAGE, k), network.initialize(k), client=k) for k, n in enumerate(sizes)]
        expected = vectorized.train(updates, task, CPU)
        for found, one in zip(vectorized.train(updates, task, CPU, None, compiler), expected, strict=True):
            assert_equal(found, one)
    assert caplog.text.count("the objective cross_entropy cannot be compiled and runs as it is: no code for this") == 1


def test_the_option_reaches_the_engine_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Classification(Network(SmallCNN))
    off, on = (load_config(Experiment, "quickstart", [f"engine.compile={value}"]) for value in ("false", "true"))
    assert off.fingerprint() == load_config(Experiment, "quickstart", []).fingerprint() != on.fingerprint()
    assert "changes nothing here" in Engine(task, CPU, EngineConfig(mode="looped", compile=True)).note

    def nothing() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", nothing)
    Engine(task, CPU, EngineConfig(mode="vectorized"))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        Engine(task, CPU, EngineConfig(mode="vectorized", compile=True))


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "spec"), [(SmallCNN, IMAGE), (Normalized, VECTOR), (Dropping, VECTOR)])
def test_compiled_gradients_agree(factory: Any, spec: InputSpec, caplog: pytest.LogCaptureFixture) -> None:
    network = Network(factory)
    updates = updates_of(network, spec, "superfed", (24, 24))
    with caplog.at_level(logging.INFO):
        engine = Engine(Classification(network), CPU, EngineConfig(mode="vectorized", compile=True))
        found = engine.execute([replace(one, begun=0) for one in updates])
    for one, other in zip(found, vectorized.train(updates, Classification(network), CPU), strict=True):
        assert_close(one, other, 1e-5)
    assert "compiled the objective" in caplog.text and "cannot be compiled" not in caplog.text
