"""What engine.compile refuses before a run, and how a step is recorded for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor
from torch.fx.experimental.proxy_tensor import make_fx

import rayfl
from rayfl.engine.engine import EngineConfig
from rayfl.engine.stacks import vectorized
from rayfl.engine.stacks.compiled_steps import Compiler, check_compilable
from rayfl.errors import ConfigError, MethodError, ResourceError
from rayfl.models.base import Network
from rayfl.models.forward_pass import ForwardPass
from rayfl.tasks.classification import Classification
from tests.support.compiler import NEEDS_COMPILER
from tests.support.experiments import small_experiment
from tests.support.problems import CPU, VECTOR, Gated, cross_entropy, examples, request
from tests.support.toy_networks import TwoLayers
from tests.support.toys import assert_equal


@NEEDS_COMPILER
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


def test_without_a_compiler_no_run_begins(tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "uncompiled", "fedavg") | {"engine": {"compile": True}}
    missing = pytest.raises(ResourceError, match=r"has no no-such-compiler on its PATH: install one \(such as g\+\+\)")
    # pytest's monkeypatch would delete the setting at its end: PyTorch does not show what it looks for.
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}), missing:
        rayfl.run(config)
    assert not list(tmp_path.glob("uncompiled/commits/*"))
