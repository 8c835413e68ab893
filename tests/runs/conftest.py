"""Finished runs that tests of this folder share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import rayfl
from rayfl.runs.folder import RunFolder
from tests.support.experiments import small_experiment
from tests.support.inspecting import Finished, opened


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Gives the folder of a run of a method, all of whose commits are kept. Each is made once a session."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def run(method: str) -> Path:
        options = {"storage.keep_commits": 9, "evaluation.every": 1, "train.rounds": 3}
        rayfl.run(small_experiment(folder, method, method, backend="inline"), **options)
        return folder / method

    return run


@pytest.fixture(scope="session")
def superfed(finished: Finished) -> RunFolder:
    """The run of SuPerFed."""
    return opened(finished("superfed-mm"))
