"""Small runs in this process, each made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rayfl
from algorithms.registry import Experiment
from rayfl.runs.folder import RunFolder, open_run
from tests.support.experiments import small_experiment

Runs = Callable[..., RunFolder]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """``made(method, **{"train.rounds": 2})``: the run of a small experiment."""
    folder = tmp_path_factory.mktemp("runs")
    known: dict[str, RunFolder] = {}

    def run(method: str, **overrides: Any) -> RunFolder:
        name = "-".join([method, *(f"{key.rpartition('.')[2]}={value}" for key, value in overrides.items())])
        name = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[:90]
        if name not in known:
            given = {"storage_path": str(folder), "train.rounds": 3, "evaluation.every": 1, **overrides}
            rayfl.run(small_experiment(folder, name, method, backend="inline"), **given)
            known[name] = open_run(str(Path(folder) / name), Experiment)
        return known[name]

    return run
