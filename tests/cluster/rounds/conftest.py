"""A run that was stopped, with every commit's rows in a part of their own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rayfl
import rayfl.storage.tables
from tests.support.damage import STOPPED
from tests.support.experiments import Interrupt, small_experiment


@pytest.fixture(scope="module")
def parts_of_one_commit() -> Iterator[None]:
    """Every commit's rows are a part of their own, so that kept commits share the older ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rayfl.storage.tables, "LARGE_PART_BYTES", 1)
        yield


@pytest.fixture(scope="module")
def stopped(parts_of_one_commit: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four rounds that was interrupted after the third."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(small_experiment(folder, "run", "scaffold", backend="inline"), callbacks=[Interrupt(STOPPED)])
    return folder / "run"


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.fixture
def experiment(tmp_path: Path) -> dict[str, Any]:
    """What continues the copy."""
    return small_experiment(tmp_path, "run", "scaffold", backend="inline")
