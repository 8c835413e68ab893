"""Every check finds what it is for, and says how to mend it."""

from __future__ import annotations

import resource
import sys
import types
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
    verdict, _, fix = doctor._version("no-such-package")
    assert (verdict, fix) == ("wrong", "pip install no-such-package")


def test_no_cluster_at_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    finding = doctor.check_cluster("127.0.0.1:9", str(tmp_path))
    assert finding.verdict == "wrong"
    assert "no Ray cluster at 127.0.0.1:9" in finding.found


@pytest.mark.usefixtures("local_ray")
def test_a_cluster(tmp_path: Path) -> None:
    finding = doctor.check_cluster("auto", str(tmp_path))
    assert finding.verdict == "ok"
    assert "1 nodes, 8 CPUs" in finding.found
