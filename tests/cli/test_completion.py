"""What shells are told to complete, asked for as they ask: through the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from algorithms.registry import METHODS, Experiment
from rayfl.cli.catalog import KINDS, catalog
from rayfl.cli.completion import names
from rayfl.config.loading import preset_names

RAYFL = Path(sys.executable).with_name("rayfl")
FORBIDDEN = "torch", "ray", "sklearn", "torchvision", "matplotlib"

pytestmark = pytest.mark.skipif(not RAYFL.is_file(), reason="the command rayfl is not installed beside this Python")


def asked(**variables: str) -> list[str]:
    """What the command prints for a shell, line by line."""
    environment = {**os.environ, **variables}
    done = subprocess.run([RAYFL], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return list(filter(None, done.stdout.splitlines()))


def bash(*words: str) -> list[str]:
    """As bash asks: an equals sign is a word of its own."""
    return asked(_RAYFL_COMPLETE="complete_bash", COMP_WORDS="\n".join(words), COMP_CWORD=str(len(words) - 1))


@pytest.mark.slow
def test_presets() -> None:
    assert sorted(bash("rayfl", "run", "")) == preset_names()
    assert bash("rayfl", "run", "quickstart-reg") == ["quickstart-regression"]
    assert bash("rayfl", "sweep", "mnist-p") == ["mnist-pathological"]
    assert bash("rayfl", "data", "show", "shakes") == ["shakespeare"]
    assert bash("rayfl", "submit", "mnist-p") == ["mnist-pathological"]


@pytest.mark.slow
def test_names_of_sections_in_bash() -> None:
    found = bash("rayfl", "run", "quickstart", "algorithm", "=", "fedp")
    assert sorted(found) == sorted(name for name in METHODS if name.startswith("fedp"))
    assert bash("rayfl", "run", "algorithm", "=", "superf") == ["superfed"]
    assert sorted(bash("rayfl", "run", "quickstart", "algorithm", "=")) == sorted(METHODS)
    assert bash("rayfl", "run", "quickstart", "train.lr", "=", "0") == []
    assert "dataset=cifar10" in bash("rayfl", "run", "quickstart", "data")
    assert bash("rayfl", "show", "scaffo") == ["scaffold"]


@pytest.mark.slow
def test_names_of_sections_in_zsh_and_fish() -> None:
    words = "rayfl run quickstart dataset=cifar"
    zsh = "\n".join(asked(_RAYFL_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=words))
    assert "dataset=cifar10" in zsh and "dataset=cifar100" in zsh and "dataset=mnist" not in zsh
    fish = {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert asked(_RAYFL_COMPLETE="complete_fish", **fish) == ["dataset=cifar10", "dataset=cifar100"]


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import os, sys; import rayfl.cli.entry, rayfl.cli.completion as c;"
        "assert c.names('model') and c.preset_names();"
        f"sys.exit(str([m for m in {FORBIDDEN!r} if m in sys.modules] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr.strip() == ""


def _names(annotation: Any) -> set[str]:
    """The names of the classes in a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {annotation.model_fields["name"].default}
    return {name for argument in get_args(annotation) for name in _names(argument)}


def test_the_names_are_those_that_a_configuration_may_have() -> None:
    for title, section in KINDS.items():
        chosen = METHODS if section == "algorithm" else _names(Experiment.model_fields[section].annotation)
        assert {entry[0] for entry in catalog(title)} == set(chosen), section
        assert set(names(section)) == set(chosen) - {"custom"}
    assert names("train") == ()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell: str) -> None:
    script = "\n".join(asked(_RAYFL_COMPLETE=f"source_{shell}"))
    assert "_RAYFL_COMPLETE" in script and "rayfl" in script


def test_it_can_be_shown_and_installed(tmp_path: Path) -> None:
    """By typer's own options, into the home folder of the shell that asks."""
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for option in ("--show-completion", "--install-completion"):
        done = subprocess.run(
            [RAYFL, option, "bash"], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "_RAYFL_COMPLETE" in "".join(path.read_text() for path in tmp_path.rglob("*.sh"))
