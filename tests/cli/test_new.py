"""``rayfl new``: what it writes can be run and tested as it is, and nothing is overwritten."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

import rayfl
from rayfl.cli.entry import app
from rayfl.cli.new import Kind, check_name, made
from rayfl.cli.panels import PANELS, arrange
from rayfl.errors import ConfigError

KINDS: tuple[Any, ...] = get_args(Kind)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def new(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["new", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.output


@pytest.mark.two_cases
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_runs(kind: str, here: Path) -> None:
    name = f"written_{kind}"
    said = new(kind, name)
    files = {path.name for path in here.iterdir()}
    assert files == {f"{name}.py", f"{name}.yaml", f"test_{name}.py"}
    assert all(f"wrote {file}" in said for file in files) and f"rayfl run {name}.yaml" in said
    short: dict[str, Any] = {
        "train.rounds": 1,
        "cluster.backend": "inline",
        "tracking.tensorboard": False,
        "storage_path": str(here),
    }
    assert rayfl.run(f"{name}.yaml", **short).rounds_completed == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_its_own_tests_pass(kind: str, here: Path) -> None:
    new(kind, "begun", "--folder", "there")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "there/test_begun.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_no_line_is_too_long_and_nothing_is_left_to_fill_in(kind: Any) -> None:
    for file, text in made(kind, "a_rather_long_name").items():
        assert text.endswith("\n") and "{{" not in text and "ARatherLongName" + "Name" not in text
        assert max(map(len, text.splitlines())) <= 130
        if file.endswith(".py"):
            compile(text, file, "exec")


def test_files_that_are_there_stay_as_they_are(here: Path) -> None:
    (here / "mine.yaml").write_text("seed: 3\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: already there, and never overwritten"):
        new("method", "mine")
    assert [path.name for path in here.iterdir()] == ["mine.yaml"]
    assert (here / "mine.yaml").read_text() == "seed: 3\n"


def test_where_it_is_written_is_said(here: Path) -> None:
    said = new("data", "mine", "--folder", "some/where")
    assert "wrote some/where/mine.py" in said and "\ncd some/where\n" in said
    assert json.loads(new("data", "other", "--json"))["files"] == ["other.py", "other.yaml", "test_other.py"]


@pytest.mark.parametrize("name", ["Mine", "my-method", "2nd", "import", "_hidden", ""])
def test_names_that_no_module_can_have_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a Python module"):
        made("method", name)


@pytest.mark.parametrize("name", ["torch", "rayfl", "json", "sys"])
def test_names_of_other_modules_are_refused(name: str, here: Path) -> None:
    with pytest.raises(ConfigError, match=f"{name!r} is the name of a module that Python has already"):
        new("method", name)
    assert not list(here.iterdir())


@pytest.mark.parametrize(("kind", "name"), [("method", "predictor"), ("data", "np"), ("model", "nn")])
def test_names_of_what_the_file_imports_are_refused(kind: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}': the file imports something else called"):
        made(kind, name)


def test_a_module_of_the_same_folder_is_no_other_one(here: Path) -> None:
    (here / "mine.py").write_text("")
    check_name("mine", here)
    with pytest.raises(ConfigError, match=r"mine\.py"):
        check_name("mine", here / "elsewhere")


def test_a_folder_that_cannot_be_written_to_is_named(here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--folder: file/below cannot be written to"):
        new("task", "mine", "--folder", "file/below")


def test_every_command_is_in_a_panel_and_experiments_come_first() -> None:
    said = CliRunner().invoke(app, ["--help"]).output
    places = [said.index(f"─ {title} ─") for title in PANELS if title != "Data and models"]
    assert places == sorted(places)
    strange = type(app)()
    strange.command()(new)
    strange.command("unheard_of")(new)
    with pytest.raises(ValueError, match="unheard_of is in no panel"):
        arrange(strange)
