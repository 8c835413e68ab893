"""No traceback reaches a user who has not asked for it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import cluster.run
from rayfl.cli.entry import main
from rayfl.errors import RunError


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
