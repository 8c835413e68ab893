"""Models for which a machine's memory does not suffice are warned of, and so is what the kernel has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rayfl
from algorithms.registry import Experiment
from cluster.planning.model_memory import memory_warning, server_warning
from rayfl.config.loading import load_config
from rayfl.diagnosis.host_memory import MemoryKills
from rayfl.experiment.parts import Parts
from rayfl.params import num_bytes
from tests.cluster.rounds.test_selection import experiment
from tests.support.cases import ALGORITHMS, toy_of
from tests.support.cases.base import SIZES, Case

GIB = 1 << 30
_NEEDED = 3 * (6 * GIB + GIB // 2)
"""Of two actors and the driver, with models of 1 GiB."""


def test_models_that_fit_are_passed_over() -> None:
    assert memory_warning(parameters=GIB // 4, actors=2, memory=_NEEDED) is None


def test_models_that_do_not_fit_are_warned_of_with_numbers() -> None:
    warning = str(memory_warning(parameters=GIB // 4, actors=2, memory=_NEEDED - 1))
    assert warning.startswith("3 processes may need 19.5 GiB for models of 1 GiB, gradients and sums")
    assert "cluster.num_actors" in warning


def test_by_default_it_is_the_memory_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.planning.model_memory.machine_memory", lambda: GIB)
    assert "this machine has 1.0 GiB" in str(memory_warning(parameters=GIB, actors=1))


def parts_of(folder: Path, **changes: Any) -> Parts:
    """Twelve clients with a model of 910 parameters, all of which are trained: 3,640 bytes."""
    return Parts(load_config(Experiment, experiment(folder, **{"selection": "uniform", **changes}), {}))


def test_a_model_of_every_client_on_the_server_is_counted_twice(tmp_path: Path) -> None:
    parts, needed = parts_of(tmp_path, algorithm={"name": "fedamp"}), 2 * 12 * 3640
    assert num_bytes(parts.initial_server()["model"]) == 3640
    assert server_warning(parts, memory=needed) is None
    warning = str(server_warning(parts, memory=needed - 1))
    assert warning.startswith(
        "algorithm=fedamp keeps a model of each client on the server: up to 0.0 GiB for 12 clients"
    )
    assert "partition.num_clients" in warning
    assert server_warning(parts_of(tmp_path, algorithm={"name": "fedavg"}), memory=1) is None


def test_last_updates_that_a_selection_needs_are_counted(tmp_path: Path) -> None:
    parts, needed = parts_of(tmp_path, selection="divfl"), 2 * 12 * (3640 + 8 * 12)
    assert server_warning(parts, memory=needed) is None
    assert str(server_warning(parts, memory=needed - 1)).startswith("selection=divfl keeps the last update of each")
    assert server_warning(parts_of(tmp_path, selection="oort"), memory=1) is None


def test_runs_are_warned_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cluster.planning.model_memory.machine_memory", lambda: 1 << 10)
    rayfl.run(experiment(tmp_path, selection="divfl", train={"rounds": 1}))
    logged = [record.getMessage() for record in caplog.records]
    assert any("selection=divfl keeps the last update of each client on the server" in line for line in logged)


KEEPING = {name: case for name, case in ALGORITHMS.items() if case.algorithm.keeps_models}


@pytest.mark.parametrize("case", KEEPING.values(), ids=KEEPING.keys())
def test_what_a_server_keeps_of_clients_is_what_its_method_says(case: Case) -> None:
    toy = toy_of(case)
    task, everyone = toy.task, range(len(SIZES))
    alone = 3 * num_bytes(task.network.initialize(0)) + num_bytes(toy.server)
    for _ in range(3):
        toy.step(list(everyone))
    grown, said = num_bytes(toy.server), len(SIZES) * case.algorithm.kept_of_client(task, len(SIZES))
    assert 0.5 * said <= grown <= said + alone


GROWING: dict[str, dict[str, Any]] = {
    "cfl": {"mean_norm": 1e9, "max_norm": 0, "split_from": 0, "min_size": 1},
    "gcfl": {"mean_norm": 1e9, "max_norm": 0, "split_from": 0, "min_size": 1, "compare": "changes"},
    "pacfl": {"threshold": 0},
    "fedcross": {},
    "fedfed": {"distillation_rounds": 1, "hidden": 4},
}


@pytest.mark.parametrize("method", GROWING)
@pytest.mark.two_cases
def test_what_a_server_keeps_of_clusters_and_samples_is_counted(method: str, tmp_path: Path) -> None:
    """Twelve clients, all of whom take part: as many clusters as clients, in four rounds of splits."""
    algorithm = {"name": method, **GROWING[method]}
    train = {"rounds": 5, "clients_per_round": "all"}
    parts = parts_of(tmp_path, algorithm=algorithm, train=train)
    said = parts.config.algorithm.kept_bytes(parts.task, parts.context, int(parts.dataset.sizes()[:12, 0].sum()))
    assert said >= 12 * 3640
    rayfl.run(parts.config.model_dump(mode="json", by_alias=True))
    manifest = parts.commits.latest()
    assert manifest is not None
    grown = num_bytes(parts.commits.read_server(manifest))
    assert 0.5 * said <= grown <= said + 3 * 3640
    warning = str(server_warning(parts, memory=2 * said - 1))
    assert warning.startswith(f"algorithm={method} keeps ")
    assert server_warning(parts, memory=2 * said) is None


def test_sums_of_changes_that_a_rule_keeps_are_counted(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, aggregator={"name": "foolsgold"})
    assert "aggregator=foolsgold keeps the sum of each client's changes" in str(server_warning(parts, memory=1))


def test_processes_that_the_kernel_ends_are_counted_from_the_beginning(tmp_path: Path) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("pgfault 7\noom_kill 21\nnr_unstable 0\n")
    kills = MemoryKills(counters)
    assert not kills.remark()
    counters.write_text("pgfault 9\noom_kill 22\nnr_unstable 0\n")
    assert (
        "has ended a process for lack of memory since the run began, perhaps this actor: then lower cluster.num_actors"
        in kills.remark()
    )
    counters.write_text("pgfault 9\noom_kill 24\nnr_unstable 0\n")
    assert "has ended 3 processes" in kills.remark()


def test_without_counters_nothing_is_counted(tmp_path: Path) -> None:
    assert not MemoryKills(tmp_path / "nothing").remark()
    (tmp_path / "other").write_text("pgfault 7\n")
    assert not MemoryKills(tmp_path / "other").remark()
