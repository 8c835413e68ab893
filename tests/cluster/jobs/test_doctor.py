"""Every check finds what it is for, and says how to mend it."""

from __future__ import annotations

import resource
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.jobs import doctor
from rayfl.cli.entry import app


def test_a_table_and_an_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    good = CliRunner().invoke(app, ["doctor", "--storage", str(tmp_path / "runs")], catch_exceptions=False)
    assert good.exit_code == 0, good.output
    for expected in ("version of ray", "torch and torchvision", "shared memory", "open files", "RAYFL_DATA", "ports"):
        assert expected in good.output
    (tmp_path / "file").write_text("")
    bad = CliRunner().invoke(app, ["doctor", "--storage", str(tmp_path / "file")], catch_exceptions=False)
    assert bad.exit_code == 1
    assert "set storage_path to" in bad.output


def test_storage_is_left_as_it_was(tmp_path: Path) -> None:
    assert doctor.check_storage(str(tmp_path)).verdict == "ok"
    assert not list(tmp_path.iterdir())


def test_torch_and_torchvision_that_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = types.ModuleType("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", broken)
    finding = doctor.check_torch()
    assert finding.verdict == "wrong"
    assert "one index" in finding.fix
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert doctor.check_torch().verdict == "wrong"


def test_too_little_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(total=64 * 2**20)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: usage)
    finding = doctor.check_shared_memory(tmp_path)
    assert finding.verdict == "warning"
    assert "--shm-size=" in finding.fix
    assert doctor.check_shared_memory(tmp_path / "none").verdict == "ok"


@pytest.mark.parametrize(
    ("soft", "verdict"), [(100, "warning"), (4096, "ok"), (resource.RLIM_INFINITY, "ok")], ids=["low", "high", "none"]
)
def test_limits(soft: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (soft, soft))
    assert doctor.check_limit("open files", resource.RLIMIT_NOFILE, 4096, "ulimit -n 65536").verdict == verdict


def test_the_folder_of_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    assert doctor.check_temporary_folder().verdict != "wrong"
    for wrong in (tmp_path / ("long" * 20), tmp_path / "none"):
        if "long" in wrong.name:
            wrong.mkdir()
        monkeypatch.setenv("RAY_TMPDIR", str(wrong))
        finding = doctor.check_temporary_folder()
        assert finding.verdict == "wrong"
        assert "RAY_TMPDIR" in finding.fix


def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    assert doctor.check_data().verdict == "ok"
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "none"))
    assert doctor.check_data().verdict == "warning"


def test_a_package_that_is_missing() -> None:
    verdict, _, fix = doctor.check_version("no-such-package")
    assert (verdict, fix) == ("wrong", "pip install no-such-package")


def test_no_cluster_at_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    finding = doctor.check_cluster("127.0.0.1:9", str(tmp_path))
    assert finding.verdict == "wrong"
    assert "no Ray cluster at 127.0.0.1:9" in finding.found


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_cluster(tmp_path: Path) -> None:
    finding = doctor.check_cluster("auto", str(tmp_path))
    assert finding.verdict == "ok"
    assert "1 nodes, 8 CPUs" in finding.found


@pytest.fixture
def gpu_modes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., doctor.Finding]:
    """Pretends that nvidia-smi says something, and that MPS runs or not; returns what the doctor finds."""

    def found(answer: str | None, mps: bool = False) -> doctor.Finding:
        tool = tmp_path / "nvidia-smi"
        tool.unlink(missing_ok=True)
        if answer is not None:
            tool.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
            tool.chmod(0o700)
        pipes = tmp_path / "pipes"
        pipes.mkdir(exist_ok=True)
        (pipes / "control").touch() if mps else (pipes / "control").unlink(missing_ok=True)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
        return doctor.check_gpu_sharing()

    return found


def test_exclusive_gpus_and_mps_are_named(gpu_modes: Callable[..., doctor.Finding]) -> None:
    assert gpu_modes("0, Default\\n1, Default\\n").found == "GPU 0: Default, GPU 1: Default"
    alone = gpu_modes("0, Default\\n1, Exclusive_Process\\n")
    assert alone.verdict == "warning"
    assert "a second process on a GPU fails" in alone.found
    assert "cluster.actors_per_gpu=1" in alone.fix
    assert "-i 1 -c DEFAULT" in alone.fix
    shared = gpu_modes("0, Exclusive_Process\\n", mps=True)
    assert shared.verdict == "ok"
    assert "MPS runs" in shared.found
    closed = gpu_modes("0, Prohibited\\n")
    assert closed.verdict == "wrong"
    assert "nvidia-smi -i 0 -c DEFAULT" in closed.fix


def test_a_machine_without_nvidia_smi(gpu_modes: Callable[..., doctor.Finding]) -> None:
    assert gpu_modes(None).found == "no nvidia-smi"
    assert gpu_modes("").found == "no nvidia-smi"
