"""Results do not depend on which processes ran the clients."""

from __future__ import annotations

from pathlib import Path

import pytest

import rayfl
from tests.cluster.experiments import METHODS, assert_same, outcome, small_experiment

SHAPES = {
    "one actor": {"num_actors": 1},
    "two actors": {"num_actors": 2},
    "three actors": {"num_actors": 3},
    "one actor per client": {"clients_per_actor": 1},
}


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("method", METHODS)
def test_any_number_of_actors_gives_the_same_bits(method: str, tmp_path: Path) -> None:
    rayfl.run(small_experiment(tmp_path, "inline", method, backend="inline"))
    inline = outcome(tmp_path / "inline")
    assert inline.rounds.num_rows > 0
    assert set(inline.rounds["round"].to_pylist()) == {1, 2, 3, 4}
    for name, shape in SHAPES.items():
        rayfl.run(small_experiment(tmp_path, "ray", method, **shape))
        assert_same(inline, outcome(tmp_path / "ray"))
        (tmp_path / "ray").rename(tmp_path / name)
