"""Small runs of two methods with two seeds each, and what reports need to know of methods."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import rayfl
from tests.support.experiments import small_experiment

SEEDS = (0, 1)
METHODS = ("fedavg", "superfed-mm")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs <method>-<seed>."""
    folder = tmp_path_factory.mktemp("runs")
    for method in METHODS:
        for seed in SEEDS:
            experiment = small_experiment(folder, f"{method}-{seed}", method, backend="inline")
            rayfl.run({**experiment, "seed": seed, "holdout": {"test": 0.3, "validation": 0.2}})
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies a run, to be changed: ``copied("fedavg-0", "name")``."""

    def copy(run: str, name: str | None = None) -> Path:
        return Path(shutil.copytree(finished / run, tmp_path / (name or run)))

    return copy
