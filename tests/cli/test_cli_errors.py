"""No traceback reaches a user who has not asked for it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

import cluster.run
import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import main
from rayfl.errors import RunError
from rayfl.runs.folder import open_run
from rayfl.runs.watching import standing
from tests.support.experiments import small_experiment


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["rayfl", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    error = KeyError("first line\nsecond line " + "x" * 1000)
    monkeypatch.setattr(cluster.run, "run_config", Mock(side_effect=error))  # raised in a file of Python's
    monkeypatch.delenv("RAYFL_DEBUG", raising=False)


@pytest.mark.usefixtures("broken")
def test_an_error_nobody_foresaw_is_one_line_that_says_how_to_see_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, "run", "quickstart", "storage_path=two words") == 1
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert err.count("\n") == 1
    assert err.startswith("error: KeyError: ")
    assert "this should not happen" in err
    assert len(err) < 800
    assert err.endswith("`rayfl --debug run quickstart 'storage_path=two words'` shows where it did\n")


def test_an_error_nobody_foresaw_in_a_users_file_ends_with_its_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: Any, **options: Any) -> None:
        raise KeyError("mine")

    monkeypatch.setattr(cluster.run, "run_config", run)
    monkeypatch.delenv("RAYFL_DEBUG", raising=False)
    assert ended(monkeypatch, "run", "quickstart") == 1
    first, *lines = capsys.readouterr().err.splitlines()
    assert "KeyError: 'mine'" in first
    assert "this should not happen" not in first
    assert lines[0].startswith(f'  File "{__file__}", line ')
    assert lines[1:] == ['    raise KeyError("mine")']


@pytest.mark.usefixtures("broken")
def test_debug_shows_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DEBUG", "")  # put back afterwards, whatever the command sets
    monkeypatch.setattr(sys, "argv", ["rayfl", "--debug", "run", "quickstart"])
    with pytest.raises(KeyError, match="second line"):
        main()


def stop_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard output and error are a pipe that nobody reads any more from here on."""
    reader, writer = os.pipe()
    for name, descriptor in (("stdout", writer), ("stderr", os.dup(writer))):
        stream = open(descriptor, "w", encoding="utf-8")  # noqa: SIM115 -- closed with the test
        for attribute in (name, f"__{name}__"):
            monkeypatch.setattr(sys, attribute, stream)
    os.close(reader)


def test_nobody_has_to_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(small_experiment(tmp_path, "run", "fedavg", backend="inline")))
    stop_reading(monkeypatch)
    assert ended(monkeypatch, "run", str(config)) == 0
    assert ended(monkeypatch, "watch", str(tmp_path / "run"), "--json") == 0
    assert open_run(str(tmp_path / "run"), Experiment).finished
    assert ended(monkeypatch, "list", "presets") == 0
    assert ended(monkeypatch, "diff", str(config), "quickstart") == 1
    assert ended(monkeypatch, "show", "--help") == 0


def test_following_ends_when_nobody_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(rayfl.run(small_experiment(tmp_path, "run", "fedavg", backend="inline")).path)
    found, view = standing(str(path), Experiment)
    look = Mock(return_value=(replace(found, state="running"), view))
    monkeypatch.setattr("rayfl.runs.watching.standing", look)
    stop_reading(monkeypatch)
    assert ended(monkeypatch, "watch", str(path), "--every", "0.1") == 141


def test_an_error_of_the_users_keeps_its_status_and_says_nothing_of_defects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAYFL_DEBUG", raising=False)
    assert ended(monkeypatch, "run", "nonsense") == 2
    assert "--debug" not in capsys.readouterr().err


def test_debug_shows_where_an_error_of_the_users_arose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DEBUG", "")
    monkeypatch.setattr(sys, "argv", ["rayfl", "--debug", "verify", str(tmp_path)])
    with pytest.raises(RunError, match="no run's folder"):
        main()


def test_sources_of_packages_that_are_not_there_are_no_lines_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAYFL_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    # The error comes from one of pyarrow's, whose compiled code names its sources in frames: "pyarrow/_fs.pyx".
    for command in (["clients"], ["verify"], ["report"], ["export", "--client", "1", "--out", "x.safetensors"]):
        assert ended(monkeypatch, *command, str(tmp_path / "nothing")) == 2
        said = capsys.readouterr().err
        assert "pyarrow" not in said
        assert said.count("\n") == 1


@pytest.mark.slow
def test_a_full_disk_behind_standard_output_ends_no_run_and_is_no_success(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    config = small_experiment(tmp_path, "run", "fedavg", backend="inline")
    file.write_text(yaml.safe_dump(config | {"train": config["train"] | {"rounds": 1}}))
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "rayfl", "run", str(file)], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 2
    assert "standard output lacks something of what was printed (No space left on device)" in ended.stderr
    assert open_run(str(tmp_path / "run"), Experiment).finished
