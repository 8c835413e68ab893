"""Models for which a machine's memory does not suffice are warned of, and so is what the kernel has ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.planning.model_memory import memory_warning
from rayfl.diagnosis.host_memory import MemoryKills

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
