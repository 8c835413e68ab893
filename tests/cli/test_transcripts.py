"""Every command prints what its transcript has, with the exit status that it has."""

from __future__ import annotations

from pathlib import Path

import pytest

import cluster.jobs.jobs
from tests.support.commands import leaves
from tests.support.docs_blocks import temporary_environment
from tests.support.docs_world import furnish
from tests.support.jobs import FakeClient
from tests.support.transcripts import FOLDER, play, steps

ELSEWHERE = {"sweep": "tests/cluster/sweep/test_sweep.py", "reproduce": "tests/reproduction/test_reproduce.py"}
"""Transcripts that are played by other tests, which have what they need."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with the current folder in it, which is the data root as well."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name, value in temporary_environment(tmp_path, folder).items():
        monkeypatch.setenv(name, value)
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAYFL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    client = FakeClient()
    monkeypatch.setattr(cluster.jobs.jobs, "connect", lambda address: client)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "model"))
        for name in sorted({path.stem for path in FOLDER.glob("*.txt")} - ELSEWHERE.keys())
    ],
)
def test_commands_print_what_is_recorded(name: str, home: Path) -> None:
    file = FOLDER / f"{name}.txt"
    furnish(home, home / "work", file.read_text(encoding="utf-8"))
    play(file, home)


def test_every_command_has_a_transcript() -> None:
    played = [step.words for file in FOLDER.glob("*.txt") for step in steps(file)]
    lacking = [" ".join(leaf) for leaf in leaves() if not any(words[1:][: len(leaf)] == leaf for words in played)]
    assert lacking == []
    for name, test in ELSEWHERE.items():
        assert f'FOLDER / "{name}.txt"' in Path(test).read_text(), name
