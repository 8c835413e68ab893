"""Results do not depend on which processes ran the clients.

The federation's own tests show the same for every method with one, two and three hosts in one process
(``tests/algorithms/test_framework.py``); these do so across real processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

import rayfl
from tests.support.experiments import METHODS, Interrupt, assert_same, outcome, small_experiment

SHAPES = {
    "one actor": {"num_actors": 1},
    "two actors": {"num_actors": 2},
    "three actors": {"num_actors": 3},
    "one actor per client": {"clients_per_actor": 1},
}


# In the quick suite tests of shared memory and of recovery compare runs in two actors with inline ones.
@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("method", "shapes"),
    [(name, SHAPES if name == "superfed-mm" else ("one actor", "three actors")) for name in METHODS],
)
def test_any_number_of_actors_gives_the_same_bits(method: str, shapes: Iterable[str], tmp_path: Path) -> None:
    rayfl.run(small_experiment(tmp_path, "inline", method, backend="inline"))
    inline = outcome(tmp_path / "inline")
    assert inline.rounds.num_rows > 0
    # rows of every round are those of a cohort that trained: where all data are in one place there is none
    without = method in ("centralized", "fedpft")
    assert set(inline.rounds["round"].to_pylist()) == ({2, 4} if without else {1, 2, 3, 4})
    for name in shapes:
        rayfl.run(small_experiment(tmp_path, "ray", method, **SHAPES[name]))
        assert_same(inline, outcome(tmp_path / "ray"))
        (tmp_path / "ray").rename(tmp_path / name)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("method", ["superfed-mm", "fedme", "fedap", "fedpub", "fedfed", "fedbuff"])
def test_an_interrupted_run_continues_to_the_same_bits_on_another_number_of_actors(method: str, tmp_path: Path) -> None:
    rayfl.run(small_experiment(tmp_path, "inline", method, backend="inline"))
    for after, actors in ((1, 2), (3, 1)):
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(small_experiment(tmp_path, "ray", method, num_actors=actors), callbacks=[Interrupt(after)])
    rayfl.run(small_experiment(tmp_path, "ray", method, num_actors=2))
    assert_same(outcome(tmp_path / "inline"), outcome(tmp_path / "ray"))
