"""Simulated devices do not depend on how many actors run the clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rayfl
from tests.support.experiments import assert_same, outcome, small_experiment

SYSTEM = {"name": "sampled", "over_sampling": 1.4, "dropout": 0.2, "deadline_s": 60}


@pytest.mark.slow
def test_every_number_of_actors_gives_the_same_bits(local_ray: None, tmp_path: Path) -> None:
    def run(name: str, **cluster: Any) -> None:
        rayfl.run({**small_experiment(tmp_path, name, "scaffold", **cluster), "system": SYSTEM})

    run("inline", backend="inline")
    run("three", num_actors=3)
    assert_same(outcome(tmp_path / "inline"), outcome(tmp_path / "three"))
    assert outcome(tmp_path / "inline").skipped.num_rows
