"""Nothing stays behind when clients train on an accelerator, which is a pretended one here."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rayfl
from cluster import run
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.examples import InputSpec
from rayfl.models.zoo import Architecture
from rayfl.params import Tree, from_numpy, map_leaves
from rayfl.tasks.classification import Classification
from rayfl.tracking.callback import Callback
from tests.models.test_zoo import SMALL
from tests.support.cases import CASES_OF_KINDS, toy_of
from tests.support.cases.base import Case
from tests.support.elsewhere import PRETENDED, REAL, context, elsewhere
from tests.support.problems import CPU, examples, request
from tests.support.toys import assert_close, assert_equal

# What is not stacked is looped there too.
MOSTLY_STACKED = pytest.mark.parametrize("mode", [pytest.param("looped", marks=pytest.mark.slow), "vectorized"])
SLOW = (
    *("resnet9", "squeezenet", "vgg9", "mobilenet none", "m5 group", "char_lstm one", "tf_cnn tutorial"),
    *("reddi_cnn dry", "simple_cnn cifar", "superfed_two_cnn"),
)
"""Beginnings of the names of models that take long, or differ little from others."""
SHORT = {"cluster.backend": "inline", "tracking.tensorboard": False, "train.rounds": 2, "train.local_epochs": 1}


def brought(tree: Tree, device: torch.device) -> Tree:
    """A tree on a device."""
    return map_leaves(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


MISTAKES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda here, there: here + there,
    "product": lambda here, there: here.T @ there,
    "concatenation": lambda here, there: torch.cat([here, there]),
    "generator": lambda _, there: torch.rand(3, device=there.device, generator=torch.Generator()),
    "array": lambda _, there: there.numpy(),
    "assignment": lambda here, there: there.index_put_((torch.tensor([0]),), here[:1]),
}


@PRETENDED
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_the_pretended_device_refuses_mistakes(mistake: Callable[[Tensor, Tensor], object]) -> None:
    here = torch.rand(2, 3)
    with elsewhere() as device, pytest.raises((RuntimeError, TypeError)):
        mistake(here, here.to(device))


def test_the_pretended_device_computes() -> None:
    here, weight = torch.rand(2, 3), torch.rand(3)
    with elsewhere() as device:
        there = here.to(device).requires_grad_()
        (slope,) = torch.autograd.grad((there @ weight.to(device)).sum() * 2, there)
        assert slope.device.type == device.type
        assert_equal(slope.cpu(), (2 * weight).expand(2, 3))
        assert_equal(there.detach()[torch.tensor([1])].cpu(), here[1:])  # indices may be on the CPU
        there.detach()[0].zero_()
        assert_equal(there.detach().cpu(), torch.stack([torch.zeros(3), here[1]]))


@pytest.mark.two_cases
@CASES_OF_KINDS
@MOSTLY_STACKED
def test_every_method_trains_and_predicts_where_it_is_told_to(case: Case, mode: str) -> None:
    expected = toy_of(case, double=False, mode=mode)
    for cohort in case.cohorts()[:2]:
        expected.step(cohort)
    with elsewhere() as device:
        toy = toy_of(case, double=False, mode=mode, device=device)
        for cohort in case.cohorts()[:2]:
            toy.step(cohort)
        scores = toy.scores()
        # The server's tree and the states are in the memory of their processes.
        assert_close(toy.server, expected.server, 1e-5)
        states = toy.states()
    for client, state in expected.states().items():
        assert_close(from_numpy(states[client]), from_numpy(state), 1e-5)
    for client, rows in expected.scores().items():
        for row, found in rows.items():
            assert_close(*(torch.from_numpy(one.vector[:2]) for one in (scores[client][row], found)), 1e-3)  # n, loss


@pytest.mark.two_cases
@MOSTLY_STACKED
@pytest.mark.parametrize(
    ("config", "spec"),
    [
        pytest.param(*one, id=name, marks=pytest.mark.slow if name.startswith(SLOW) else ())
        for name, one in SMALL.items()
    ],
)
def test_every_model_trains_elsewhere(config: Architecture, spec: InputSpec, mode: str) -> None:
    task = Classification(config.network(spec))
    # By the deviation of few samples rounding is magnified: in float32, devices that round differently do not agree.
    kind = torch.float64 if REAL and task.network.batch_statistics else torch.float32

    def typed(leaf: Tensor) -> Tensor:
        return leaf.to(kind) if leaf.is_floating_point() else leaf

    drawn = [examples(12, spec, k) for k in range(2)]
    given = [
        request(replace(one, x=typed(one.x)), map_leaves(typed, task.network.initialize(k)), client=k)
        for k, one in enumerate(drawn)
    ]
    expected = Engine(task, CPU, EngineConfig(mode=mode)).execute(given)
    with elsewhere() as device:
        moved = [
            replace(one, examples=replace(one.examples, x=one.examples.x.to(device), y=one.examples.y.to(device)))
            for one in given
        ]
        found = Engine(task, device, EngineConfig(mode=mode)).execute(moved)
        for one, other in zip(found, expected, strict=True):
            assert_close(brought(one, CPU), other, 1e-4)


def test_tests_compute_on_the_device_that_they_name_and_on_no_other() -> None:
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == "" or REAL
    assert not torch.cuda.is_available() or REAL
    with elsewhere() as device:
        assert device.type == (torch.device(REAL).type if REAL else "meta")


@PRETENDED
def test_the_pretended_device_has_a_context_and_a_memory() -> None:
    with elsewhere(memory=1000) as device:
        kept = [torch.zeros(100, device=device) for _ in range(2)]
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(100, device=device)
        assert (context().live, context().most) == (800, 800)
        kept.pop()
        view = torch.zeros(100, device=device)[3:]  # what is free can be taken, and views take nothing
        assert context().live == 800
        table = kept[0].view(50, 2)
        with pytest.raises(RuntimeError, match="device-side assert"):
            table.index_select(0, torch.tensor([50], device=device))
        for use in (lambda: view + 1, lambda: view.cpu(), lambda: torch.zeros(1, device=device)):
            with pytest.raises(RuntimeError, match="device-side assert"):
                use()
    with elsewhere() as device:
        torch.zeros(100, device=device)


@pytest.mark.parametrize("alike", [True, False])
def test_sums_of_an_accelerator_come_home(alike: bool) -> None:
    trees = [{"a": torch.rand(5), "b": {"c": torch.rand(2, 2, dtype=torch.float64)}} for _ in range(3)]
    if alike:
        trees = trees[:1] * 3
    expected, total = ExactSum(), ExactSum()
    for tree in trees:
        expected.add(Weighted(tree, 3))
    with elsewhere() as device:
        for tree in trees:
            total.add(Weighted(brought(tree, device), 3))
        sent = pickle.dumps(total)
        mean = total.mean()
    assert_equal(mean, expected.mean())
    assert_equal(pickle.loads(sent).mean(), expected.mean())


RUNS: dict[str, dict[str, Any]] = {
    "superfed": {"algorithm": {"name": "superfed", "start": 0.0}},
    "augmented": {"algorithm": "fedavg", "augment.crop": 1, "augment.flip": True},
    "batch norm kept by clients": {
        "algorithm": "fedavg",
        "model": {"name": "resnet9", "norm": "batch"},
        "train.private_norm": "statistics",
        "train.clients_per_round": 2,
    },
    "failures are skipped": {"algorithm": "ditto", "clients.on_error": "skip"},
}


class Interruption(Callback):
    """Ends a run in its second round."""

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        if rounds_completed == 2:
            raise InterruptedError


@MOSTLY_STACKED
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(run, id=name, marks=[] if name in ("superfed", "failures are skipped") else [pytest.mark.slow])
        for name, run in RUNS.items()
    ],
)
@pytest.mark.first_case
def test_whole_runs(settings: dict[str, Any], mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also commits, and what is restored from them."""
    options = {**SHORT, **settings, "engine.mode": mode, "storage_path": str(tmp_path)}
    monkeypatch.setattr(run, "inline_device", lambda wanted: "cpu")
    expected = rayfl.run("quickstart", **options, name="here")
    with elsewhere() as device:
        monkeypatch.setattr(run, "inline_device", lambda wanted: device.type)
        with pytest.raises(InterruptedError):
            rayfl.run("quickstart", callbacks=[Interruption()], **options, name="there")
        found = rayfl.run("quickstart", **options, name="there")
    columns = ["round", "split", "cohort", "phase", "model"]
    assert found.clients.select(columns).equals(expected.clients.select(columns))
    losses = (torch.tensor(table["loss"].to_numpy()) for table in (found.clients, expected.clients))
    assert_close(*losses, 1e-3)
