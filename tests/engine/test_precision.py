"""``engine.precision`` is what networks and GPUs compute in, and nothing else: trees, losses and sums stay float32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import cluster.run
import rayfl
from actors.hosting.building import build_host
from algorithms.fedavg import FedAvg
from algorithms.registry import Experiment
from cluster.replay import replay
from rayfl.config.loading import load_config
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.precision import arithmetic, set_arithmetic, why_not
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts
from rayfl.models.networks.recurrent import CharLSTM
from rayfl.models.reduced_precision import reduced_precision
from rayfl.models.zoo import Architecture, TwoNN
from rayfl.optimization.optimizers import OptimizerState
from rayfl.params import leaves
from rayfl.runs.folder import open_run
from rayfl.tasks.base import Batch, Predictor, Task
from rayfl.tasks.classification import Classification
from tests.models.test_zoo import SMALL
from tests.support.experiments import outcome, small_experiment
from tests.support.problems import CPU, cross_entropy, examples, request, slots_of
from tests.support.toys import assert_close

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
IMAGE = InputSpec("image", (1, 6, 6), 4)
TOKENS = InputSpec("tokens", (7,), 10, 10)
QUICK = ("superfed_cnn", "mobilenet none", "tf_cnn", "reddi_cnn")
BACKENDS = ("", "cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


def flags() -> dict[str, Any]:
    """Everything that decides how float32 is multiplied, as PyTorch says it."""
    found: dict[str, Any] = {
        "matmul": torch.get_float32_matmul_precision(),
        "cublas": torch.backends.cuda.matmul.allow_tf32,
        "cudnn": torch.backends.cudnn.allow_tf32,
        "reduced": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    }
    if hasattr(torch.backends, "fp32_precision"):
        for path in BACKENDS:
            backend: Any = torch.backends
            for name in filter(None, path.split(".")):
                backend = getattr(backend, name)
            found[path] = backend.fp32_precision
    return found


@pytest.fixture(autouse=True)
def _flags_as_before() -> Iterator[None]:
    with arithmetic("float32"):
        yield


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_all_flags_are_set_whatever_they_were(precision: Any) -> None:
    torch.backends.cudnn.allow_tf32 = precision != "tf32"
    torch.set_float32_matmul_precision("highest" if precision == "tf32" else "medium")
    if hasattr(torch.backends, "fp32_precision"):
        torch.backends.fp32_precision = "tf32"
        torch.backends.mkldnn.conv.fp32_precision = "tf32"
    set_arithmetic(precision)
    found = flags()
    tf32 = precision == "tf32"
    assert (found["cublas"], found["cudnn"], found["reduced"]) == (tf32, tf32, False)
    for path in BACKENDS:
        on_gpu = path.startswith("cu")
        assert found.get(path, "ieee") == ("tf32" if tf32 and on_gpu else "ieee"), path


def test_flags_are_as_before_afterwards() -> None:
    for precision in ("float32", "tf32"):
        set_arithmetic(precision)  # type: ignore[arg-type]
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        before = flags()
        for other in ("tf32", "bfloat16", "float32"):
            with arithmetic(other):  # type: ignore[arg-type]
                torch.backends.cudnn.allow_tf32 = True
            assert flags() == before


@pytest.mark.slow
def test_the_defaults_of_pytorch_are_restored_and_nothing_warns() -> None:
    code = (
        "import warnings; warnings.simplefilter('error'); import torch; from tests.engine.test_precision import *\n"
        "before = flags()\nwith arithmetic('tf32'): pass\nassert flags() == before, (flags(), before)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_every_process_that_computes_sets_the_flags(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = small_experiment(tmp_path, "run", "fedavg", backend="inline")
    content |= {"engine": {"precision": precision}, "storage": {"keep_commits": 4}}
    set_arithmetic("float32" if precision == "tf32" else "tf32")
    before, seen = flags(), []
    built = cluster.run.build_host

    def build(*arguments: Any, **options: Any) -> Any:
        host = built(*arguments, **options)
        seen.append(flags()["cudnn"])
        return host

    for module in ("cluster.run", "cluster.replay"):
        monkeypatch.setattr(f"{module}.build_host", build)
    rayfl.run(content)
    client = Parts(load_config(Experiment, content, {})).cohort(1)[0]
    replay(open_run(str(tmp_path / "run"), Experiment), 2, client)
    assert seen == [precision == "tf32"] * 2
    assert flags() == before
    build_host(load_config(Experiment, content, {}), 0, "cpu")  # as an actor does, whose process is its own
    assert flags()["cudnn"] == (precision == "tf32")


class Seen:
    """The types of what an objective is given and of what a network makes of it."""

    def __init__(self) -> None:
        self.types: set[torch.dtype] = set()

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, logits = task.features_and_logits(model, batch)
        read, again = task.head_inputs_and_logits(model, batch)
        lone = task.classify(model, task.features(model, batch))
        found = [features, logits, read, again, lone, task.logits(model, batch), *model.values()]
        self.types |= {tensor.dtype for tensor in found}
        return task.loss(model, batch)


def task_of(config: Architecture, spec: InputSpec) -> Classification:
    return Classification(config.network(spec))


def trained(precision: str, mode: str, config: Architecture, spec: InputSpec, objective: Any = cross_entropy) -> Any:
    task = task_of(config, spec)
    own = Engine(task, CPU, EngineConfig(mode=mode, precision=precision))  # type: ignore[arg-type]
    given = [
        replace(
            request(examples(12 + k, spec, k), task.network.initialize(k), objective, client=k, lr=1e-3),
            optimizer_state=OptimizerState(),
        )
        for k in range(2)
    ]
    found = own.execute(given)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found, [slots_of(one) for one in given]


@pytest.mark.parametrize(("device", "recurrent", "narrow"), [("cuda", True, 0), ("cuda", False, 1), ("cpu", True, 1)])
def test_recurrent_layers_of_cudnn_keep_their_type(
    device: str, recurrent: bool, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    autocast = mock.MagicMock()
    monkeypatch.setattr(torch, "autocast", autocast)
    with reduced_precision(torch.bfloat16, torch.device(device), recurrent):
        assert autocast.call_count == narrow


def test_stacked_recurrent_layers_are_no_librarys() -> None:
    network = CharLSTM(embedding=2, hidden=3, layers=1).network(TOKENS)
    network.compute_in(torch.bfloat16)
    trees = [network.initialize(k) for k in range(2)]
    x = examples(2, TOKENS, 0).x
    with mock.patch("rayfl.models.bound.reduced_precision", wraps=reduced_precision) as entered:
        network.logits(trees[0], x)
        stack = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
        torch.vmap(network.logits, in_dims=(0, None))(stack, x)
    assert [call.args[2] for call in entered.call_args_list] == [True, False]


@MODES
@pytest.mark.parametrize(
    ("config", "spec"),
    [
        pytest.param(*made, id=name, marks=() if name in QUICK or name.startswith("char") else pytest.mark.slow)
        for name, made in SMALL.items()
    ],
)
@pytest.mark.two_cases
def test_every_model_trains_in_bfloat16_with_trees_in_float32(config: Any, spec: InputSpec, mode: str) -> None:
    exact, _ = trained("float32", mode, config, spec)
    found, momenta = trained("bfloat16", mode, config, spec)
    for one, other, velocity in zip(found, exact, momenta, strict=True):
        tensors = [leaf for _, leaf in [*leaves(one), *leaves(velocity)]]
        assert {leaf.dtype for leaf in tensors} == {torch.float32}
        # statistics of batches of two magnify what is rounded
        if not task_of(config, spec).network.batch_statistics:
            assert_close(one, other, 0.02)
        assert any(not torch.equal(one[name], other[name]) for name in one), "computed in float32"


def test_looped_and_stacked_agree_as_bfloat16_does() -> None:
    for config in (TwoNN(hidden=(20,)), TwoNN(hidden=(30, 10))):
        for objective in (cross_entropy, FedAvg().objective):
            looped, stacked, exact = (
                trained(precision, mode, config, IMAGE, objective)[0]
                for precision, mode in (("bfloat16", "looped"), ("bfloat16", "vectorized"), ("float32", "looped"))
            )
            for one, other, third in zip(looped, stacked, exact, strict=True):
                assert_close(one, other, 2e-3)
                assert max(float((one[name] - third[name]).abs().max()) for name in one) > 1e-6


@MODES
@pytest.mark.parametrize("config", [TwoNN(hidden=(20,)), CharLSTM(embedding=4, hidden=5)], ids=["two_nn", "lstm"])
def test_what_leaves_a_network_is_float32(config: Any, mode: str) -> None:
    seen = Seen()
    trained("bfloat16", mode, config, TOKENS if isinstance(config, CharLSTM) else IMAGE, seen.objective)
    assert seen.types == {torch.float32}


def test_evaluation_is_in_bfloat16_too() -> None:
    vectors = {}
    for precision in ("float32", "bfloat16"):
        task = task_of(TwoNN(hidden=(20,)), IMAGE)
        Engine(task, CPU, EngineConfig(precision=precision))  # type: ignore[arg-type]
        predictors = {"m": Predictor.of(task.network.initialize(0))}
        vectors[precision] = evaluate(predictors, examples(50, IMAGE, 0), task, 512)["m"]
    exact, narrow = vectors["float32"], vectors["bfloat16"]
    assert exact.n == narrow.n == 50
    assert 0 < abs(exact.loss - narrow.loss) < 0.01


def test_what_cannot_be_in_bfloat16_is_refused_by_name() -> None:
    task = task_of(TwoNN(hidden=(20,)), IMAGE)
    own = Engine(task, CPU, EngineConfig(precision="bfloat16"))
    double = {name: leaf.double() for name, leaf in task.network.initialize(0).items()}
    (error,) = own.execute([request(examples(9, IMAGE, 0, torch.float64), double)])
    assert isinstance(error, ModelError)
    assert "a model in float64 cannot compute in torch.bfloat16: set engine.precision=float32" in str(error)


def test_what_a_device_does_instead_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(TwoNN(hidden=(20,)), IMAGE)
    note = Engine(task, CPU, EngineConfig(precision="tf32")).note
    assert note == "engine.precision=tf32 is for GPUs: on cpu it is float32"
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    for capability, silent in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert not why_not("float32", gpu)
        for precision in ("tf32", "bfloat16"):
            assert bool(why_not(precision, gpu)) != silent  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_not("bfloat16", gpu)[0].endswith("on Tesla T4 it is emulated, and slow")


def test_the_precision_identifies_a_run() -> None:
    content = small_experiment(Path("nowhere"), "run", "fedavg")
    prints = {
        load_config(Experiment, content | {"engine": {"precision": precision}}, {}).fingerprint()
        for precision in ("float32", "tf32", "bfloat16")
    }
    assert len(prints) == 3
    assert load_config(Experiment, content, {}).fingerprint() in prints


@MODES
@pytest.mark.first_case
def test_a_run_in_bfloat16(mode: str, tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "run", "superfed-mm", backend="inline")
    result = rayfl.run(content | {"engine": {"precision": "bfloat16", "mode": mode}})
    assert result.rounds_completed == 4
    kept = outcome(tmp_path / "run")
    trees = [kept.server, *kept.states.values()]
    assert {leaf.dtype for tree in trees for _, leaf in leaves(tree) if isinstance(leaf, Tensor)} == {torch.float32}
