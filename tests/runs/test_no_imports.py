"""Commands that look at a run import no code that it names, unless they are told to trust it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config, to_yaml
from rayfl.config.own_code import NamedMethod, named_code
from rayfl.errors import ConfigError
from rayfl.runs.folder import open_run
from tests.support.commands import command
from tests.support.experiments import small_experiment

CODE = """
from typing import ClassVar

import numpy as np
from torch import nn

from algorithms.fedavg import FedAvg


class Mine(FedAvg):
    name: str = "mine"
    personalized: ClassVar[str] = "global"
    strength: float = 0.25


def blobs(seed):
    y = np.arange(200) % 3
    x = np.random.default_rng(seed).normal(y[:, None], 1, (200, 8)).astype(np.float32)
    return x, y, 3


def net(spec):
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 3))
"""
TRAP = "from pathlib import Path\nPath(__file__).with_name('sprung').touch()\n" + CODE
NAMES = ("method", "data", "model")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that name a method, data and a model of somebody's own."""
    place = tmp_path_factory.mktemp("theirs")
    before = list(sys.path)
    sys.path.append(str(place))
    (place / "theirs.py").write_text(CODE)
    named = {
        "method": {"algorithm": {"name": "theirs:Mine", "strength": 0.5}},
        "data": {"dataset": "theirs:blobs"},
        "model": {
            "dataset": "theirs:blobs",
            "model": {"name": "custom", "factory": "theirs:net", "head": "1"},
            "algorithm": "theirs:Mine",
        },
    }
    for name, sections in named.items():
        config = {**small_experiment(place, name, "fedavg", backend="inline"), **sections}
        rayfl.run(config, **{"train.rounds": 2})
    sys.path[:] = before
    _forget()
    return place


@pytest.fixture
def folder(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The runs, beside a module of that name that says when it is imported."""
    place = Path(shutil.copytree(runs, tmp_path / "runs"))
    (place / "theirs.py").write_text(TRAP)
    shutil.rmtree(place / "__pycache__", ignore_errors=True)
    monkeypatch.chdir(place)
    before = list(sys.path)
    yield place
    sys.path[:] = before
    _forget()


def _forget() -> None:
    sys.modules.pop("theirs", None)


def sprung(folder: Path) -> bool:
    """Whether the module was imported; sets the trap again."""
    found = (folder / "sprung").exists() or "theirs" in sys.modules
    (folder / "sprung").unlink(missing_ok=True)
    _forget()
    return found


@pytest.mark.parametrize("name", ["method", *(pytest.param(one, marks=pytest.mark.slow) for one in ("data", "model"))])
def test_what_is_recorded_is_shown_without_an_import(folder: Path, name: str) -> None:
    command("clients", name)
    command("show", name)
    for kind in ("curves", "clients", "variance"):
        command("plot", kind, name, *(["--x", "rounds"] if kind == "curves" else []))
    command("report", name)
    assert command("diff", name, name).startswith("0 differences; the same results")
    command("verify", name)
    assert not sprung(folder)


def test_the_configuration_of_a_folder_is_shown_as_it_was_resolved(folder: Path) -> None:
    shown = yaml.safe_load(command("show", "method"))
    assert shown["algorithm"] == yaml.safe_load((folder / "method" / "config.yaml").read_text())["algorithm"]
    assert shown["algorithm"]["strength"] == 0.5
    text = command("diff", "method", "model", status=1)
    assert "algorithm.strength" in text and "other results" in text
    with pytest.raises(ConfigError, match="overrides do not apply to the folder"):
        command("show", "method", "seed=1")
    assert not sprung(folder)


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "method", "--client", "0", "--out", "m.safetensors"],
        pytest.param(["export", "data", "--client", "0", "--out", "m.safetensors"], marks=pytest.mark.slow),
        ["plot", "landscape", "model", "--plane", "random", "--points", "5", "--samples", "20"],
        ["data", "stats", "data/config.yaml"],
        *(pytest.param(["data", which, "data"], marks=pytest.mark.slow) for which in ("stats", "show")),
    ],
)
def test_what_needs_code_asks_for_trust(folder: Path, arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"names code that would be imported and run.*theirs:.*--trust"):
        command(*arguments)
    assert not sprung(folder)
    assert not list(folder.glob("m.*"))
    command(*arguments, "--trust")
    assert sprung(folder)


def test_a_folder_may_have_any_name(folder: Path) -> None:
    (folder / "method").rename(folder / "strength=0.5")
    assert "the same results" in command("diff", "strength=0.5", "strength=0.5/config.yaml", status=1)
    assert "strength: 0.5" in command("show", "strength=0.5")


def test_the_data_of_a_run_need_no_method(folder: Path) -> None:
    assert "clients" in command("data", "stats", "method")
    assert not sprung(folder)


def test_replay_imports(folder: Path) -> None:
    cohort = open_run("method", Experiment).clients.to_pylist()
    client = next(row["client"] for row in cohort if (row["round"], row["phase"]) == (2, "trained"))
    assert "equal to the bit" in command("replay", "method", "--round", "2", "--client", str(client))
    assert sprung(folder)


def test_a_file_is_looked_at_without_an_import_and_what_the_command_itself_names_is_trusted(folder: Path) -> None:
    (folder / "mine.yaml").write_text("algorithm: theirs:Mine\ndataset: digits\nmodel: two_nn\n")
    text = command("show", "mine.yaml")
    assert "theirs:Mine is not imported" in text and "strength: 0.25" not in text
    assert "theirs:Mine is not imported" in command("diff", "mine.yaml", "method", status=1)
    assert not sprung(folder)
    assert "strength: 0.25" in command("show", "mine.yaml", "--trust")
    assert sprung(folder)
    assert "strength: 0.25" in command("show", "quickstart", "algorithm=theirs:Mine")
    assert "samples by label" in command("data", "stats", "quickstart", "dataset=theirs:blobs")
    assert sprung(folder)


def test_a_configuration_that_is_not_trusted_is_the_same_one(folder: Path) -> None:
    trusted = load_config(Experiment, folder / "method" / "config.yaml", [])
    looked_at = load_config(Experiment, folder / "method" / "config.yaml", [], trust=False)
    assert isinstance(looked_at.algorithm, NamedMethod)
    assert looked_at.fingerprint() == trusted.fingerprint()
    assert to_yaml(looked_at) == to_yaml(trusted)
    for name, expected in zip(
        NAMES, (["theirs:Mine"], ["theirs:blobs"], ["theirs:blobs", "theirs:net", "theirs:Mine"]), strict=True
    ):
        assert named_code(open_run(name, Experiment).config) == expected


def test_models_among_candidates_are_code_too() -> None:
    models = {"candidates": [{"name": "two_nn"}, {"name": "theirs:net", "head": "1"}]}
    config = load_config(Experiment, "quickstart", {"model": models, "algorithm": "fedme"})
    assert named_code(config) == ["theirs:net"]
