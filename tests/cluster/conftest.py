"""What tests of this folder share, because making it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

import rayfl
from cluster.rounds.session import start_local
from tests.support.experiments import small_experiment


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One local Ray."""
    start_local(num_cpus=8)  # logical: room for one actor per client on any machine
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of SCAFFOLD in this process."""
    folder = tmp_path_factory.mktemp("calm")
    rayfl.run(small_experiment(folder, "run", "scaffold", backend="inline"))
    return folder / "run"
