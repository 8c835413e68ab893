"""What a method says before a run whose rounds end before its phases begin."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import rayfl
from tests.support.experiments import small_experiment


def remarks(caplog: pytest.LogCaptureFixture, folder: Path, method: str, **options: Any) -> list[str]:
    config = small_experiment(folder, "run", method, backend="inline")
    config["algorithm"] |= options
    with caplog.at_level(logging.WARNING):
        rayfl.run(config, **{"train.rounds": 2})
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("algorithm: ")]


@pytest.mark.parametrize(
    ("method", "late", "words"),
    [
        ("floco", {"assignment_round": 2}, "algorithm.assignment_round is 2, but the run has 2 rounds"),
        ("cfl", {"split_from": 2}, "algorithm.split_from is 2, but the run has 2 rounds"),
        ("fedme", {"cluster_rounds": [2]}, r"algorithm.cluster_rounds is [2], of which none is before"),
    ],
)
def test_a_phase_that_no_round_reaches_is_named(
    method: str, late: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (said,) = remarks(caplog, tmp_path, method, **late)
    assert words in said
    caplog.clear()
    name, value = next(iter(late.items()))
    assert remarks(caplog, tmp_path / "reached", method, **{name: [1] if isinstance(value, list) else 1}) == []


def test_one_cluster_by_choice_needs_no_remark(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert remarks(caplog, tmp_path, "fedme", cluster_rounds=[], model_clustering=False) == []
