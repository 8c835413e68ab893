"""Steps on the line between two models agree with those of autograd, and are taken where they may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.superfed import SuPerFed
from rayfl.data.federated import InputSpec
from rayfl.engine import line, looped, mixing, moved, steps
from rayfl.engine.requests import ParameterGroup, TrainRequest
from rayfl.engine.steps import Kernel
from rayfl.models.base import Network
from rayfl.models.perceptron import TwoNN
from rayfl.models.recurrent import CharLSTM
from rayfl.objectives import Declared, Mixture, Pull, declared
from rayfl.params import Tree
from rayfl.tasks import Classification, Model, Task
from tests.engine.problems import CPU, Dropping, Normalized, Partly, SmallCNN, examples, request
from tests.toys import DoubleNetwork, assert_close, assert_equal

SPEC = InputSpec("image", (1, 4, 4), 5)
# 7 and 37 units fill no whole vector of the processor, so that their tensors are followed by padding.
ARCHITECTURE = TwoNN(hidden=(7, 37))
METHODS = {
    "mm": SuPerFed(),
    "lm": SuPerFed(mode="lm"),
    "alone": SuPerFed(orthogonality_weight=0, proximal_weight=0),
    "far": SuPerFed(mode="lm", proximal_weight=0.3, orthogonality_weight=5),
}
RULES: dict[str, dict[str, Any]] = {
    "as usual": {},
    "without momentum": {"momentum": 0.0, "weight_decay": 0.0},
    "one rule in groups": {"groups": (("federated", ParameterGroup(lr=0.02)), ("local", ParameterGroup(lr=0.02)))},
}
OTHER_RULES: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.05},
    "two rules": {"groups": (("local", ParameterGroup(lr=0.3)),)},
    "bounds": {
        "groups": (("federated", ParameterGroup(bounds=(-0.1, 0.1))), ("local", ParameterGroup(bounds=(-0.1, 0.1))))
    },
}


VECTORS, LETTERS = InputSpec("vector", (6,), 4), InputSpec("tokens", (7,), 9, vocabulary=9)
NETWORKS: dict[str, tuple[Callable[[], Network], InputSpec]] = {
    "chain": (lambda: ARCHITECTURE.network(SPEC), SPEC),
    "convolution": (lambda: Network(lambda: SmallCNN(5)), InputSpec("image", (1, 6, 6), 5)),
    "batch norm": (lambda: Network(Normalized), VECTORS),
    "dropout": (lambda: Network(Dropping), VECTORS),
    "idle layer": (lambda: Network(Partly), VECTORS),
    "LSTM": (lambda: CharLSTM(hidden=13).network(LETTERS), LETTERS),
}


def update(
    method: SuPerFed, task: Task, dtype: torch.dtype = torch.float32, spec: InputSpec = SPEC, **options: Any
) -> TrainRequest:
    start, end, received = (task.network.initialize(seed) for seed in (1, 2, 3))
    width = () if method.mode == "mm" else (len(task.network.layers),)
    shares = torch.rand(6, *width, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    data = examples(23, spec, 5, dtype)
    base = request(data, {"federated": start, "local": end}, method.objective, frozen={"received": received})
    return replace(base, draws={"coefficient": shares}, **options)


def train(update: TrainRequest, task: Task, kernel: Kernel) -> tuple[Tree, Tree]:
    velocity: dict[str, Tensor] = {}
    return looped.train(replace(update, velocity=velocity), task, CPU, kernel), velocity


@pytest.mark.parametrize("piece", [1 << 16, 64])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", METHODS)
def test_the_steps_are_those_of_autograd(method: str, rule: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "PIECE", piece)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        network = (
            ARCHITECTURE.network(SPEC) if dtype == torch.float32 else DoubleNetwork(lambda: ARCHITECTURE.build(SPEC))
        )
        task = Classification(network)
        given = update(METHODS[method], task, dtype, **RULES[rule])
        expected = train(given, task, "reference")
        with monkeypatch.context() as patch:
            patch.setattr(mixing, "_exact", None)
            patch.setattr(steps, "_by_autograd", None)  # the only other ways
            found = train(given, task, "fast")
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, tolerance)
        assert_equal(found[0], train(given, task, "fast")[0])
        assert not torch.equal(found[0]["local"]["head.weight"], given.trainable["local"]["head.weight"])


class Undeclared(SuPerFed):
    """The same, of which the engine cannot know."""

    def mix(self, federated: Model, local: Model, coefficient: Tensor, task: Task) -> Tree:
        return super().mix(federated, local, coefficient, task)


@pytest.mark.parametrize("exact", [True, False], ids=["fused", "operation by operation"])
@pytest.mark.parametrize("rule", RULES | OTHER_RULES)
@pytest.mark.parametrize("method", METHODS)
def test_the_reference_has_the_bits_of_autograd(
    method: str, rule: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moved, "is_exact", lambda dtype, device: exact)
    for bias, hidden in ((True, (7, 37)), (False, (16, 32))):
        task = Classification(TwoNN(hidden=hidden, bias=bias).network(SPEC))
        undeclared = Undeclared(**METHODS[method].model_dump(exclude={"name"}))
        expected = train(update(undeclared, task, **(RULES | OTHER_RULES)[rule]), task, "reference")
        with monkeypatch.context() as patch:
            patch.setattr(steps, "_by_autograd", None)  # the only other way
            found = train(update(METHODS[method], task, **(RULES | OTHER_RULES)[rule]), task, "reference")
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_under_other_rules_fast_steps_are_exact_ones(rule: str) -> None:
    task = Classification(ARCHITECTURE.network(SPEC))
    given = update(METHODS["mm"], task, **OTHER_RULES[rule])
    for one, other in zip(train(given, task, "fast"), train(given, task, "reference"), strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("piece", [1 << 16, 64])
@pytest.mark.parametrize("rule", ["as usual", *OTHER_RULES])
@pytest.mark.parametrize("method", ["mm", "lm"])
@pytest.mark.parametrize("network", NETWORKS)
def test_any_network_is_mixed_without_a_graph(
    network: str, method: str, rule: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default kernel with the bits of autograd, the fast one nearly; buffers and dropout included."""
    monkeypatch.setattr(line, "PIECE", piece)
    make, spec = NETWORKS[network]
    task = Classification(make())
    given = update(METHODS[method], task, spec=spec, **(RULES | OTHER_RULES)[rule])
    undeclared = Undeclared(**METHODS[method].model_dump(exclude={"name"}))
    expected = train(update(undeclared, task, spec=spec, **(RULES | OTHER_RULES)[rule]), task, "reference")
    monkeypatch.setattr(steps, "_by_autograd", None)  # the only other way
    for one, other in zip(train(given, task, "reference"), expected, strict=True):
        assert_equal(one, other)
    for one, other in zip(train(given, task, "fast"), expected, strict=True):
        assert_close(one, other, 1e-5)


def test_what_else_is_trained_is_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "mixed_step", None)
    task = Classification(ARCHITECTURE.network(SPEC))
    given = update(METHODS["mm"], task)
    more = replace(given, trainable={**given.trainable, "more": {"head.bias": torch.zeros(5)}})
    assert_close(train(more, task, "fast")[0], train(more, task, "reference")[0], 1e-5)


@pytest.mark.parametrize("exact", [True, False], ids=["fused", "operation by operation"])
@pytest.mark.parametrize("kernel", ["reference", "fast"])
def test_the_first_phase_has_the_bits_of_autograd(kernel: Kernel, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved, "is_exact", lambda dtype, device: exact)
    task = Classification(ARCHITECTURE.network(SPEC))
    received = {"received": task.network.initialize(1)}

    found = [
        train(
            request(examples(23, SPEC, 5), {"federated": task.network.initialize(2)}, objective, frozen=received),
            task, "reference" if method is Undeclared else kernel,
        )
        for method in (SuPerFed, Undeclared)
        for objective in [method(proximal_weight=0.3).federated_objective]
    ]  # fmt: skip
    for one, other in zip(*found, strict=True):
        assert_equal(one, other)


def test_what_is_declared() -> None:
    assert declared(SuPerFed().federated_objective) == Declared(Pull("received", 0.02), "federated")
    assert declared(SuPerFed(proximal_weight=0).federated_objective) == Declared(None, "federated")
    mixture = Mixture("federated", "local", "coefficient", None, 1.0)
    assert declared(SuPerFed().objective) == Declared(Pull("received", 0.02), mixture=mixture)
    known = declared(SuPerFed(mode="lm", orthogonality_weight=3).objective)
    assert known is not None
    assert known.mixture is not None
    assert known.mixture.orthogonality == 3
    assert known.mixture.groups is not None
    task = Classification(ARCHITECTURE.network(SPEC))
    groups: Sequence[Sequence[str]] = known.mixture.groups(task)
    assert list(groups) == list(task.network.layers)
    for method in (SuPerFed(proximal_form="norm_per_layer"), Mixed()):
        assert declared(method.objective) is None
        assert declared(method.federated_objective) is None


class Mixed(SuPerFed):
    """Mixes in its own way."""

    def mix(self, federated: Model, local: Model, coefficient: Tensor, task: Task) -> Tree:
        return super().mix(federated, local, 1 - coefficient, task)
