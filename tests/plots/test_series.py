"""Runs become series with short labels; repetitions are one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfl.errors import ConfigError
from rayfl.plots.phases import second_phase
from rayfl.plots.series import fields_that_differ, need_same_but, over_seeds, series_of
from rayfl.plots.style import COLOURS, TAU, colour, marker
from tests.plots.conftest import Runs


def test_labels_say_what_differs_and_no_more(made: Runs) -> None:
    runs = [made("superfed-mm"), made("superfed-mm", seed=1), made("superfed-lm"), made("fedavg")]
    found = series_of(runs)
    assert [series.label for series in found] == ["superfed, mode=mm", "superfed, mode=lm", "fedavg"]
    assert [len(series.runs) for series in found] == [2, 1, 1]


def test_evaluation_makes_no_other_experiment(made: Runs) -> None:
    assert fields_that_differ([made("fedavg"), made("fedavg", **{"evaluation.every": 3})]) == []


def test_other_fields_are_named(made: Runs) -> None:
    runs = [made("superfed-mm"), made("superfed-lm")]
    need_same_but(runs, ["algorithm.mode"], "x")
    with pytest.raises(ConfigError, match=r"these differ in algorithm.mode as well"):
        need_same_but(runs, ["algorithm.start"], "x")


def test_second_phases(made: Runs) -> None:
    assert second_phase(made("floco").config) == (2, TAU)
    assert second_phase(made("superfed-mm", **{"algorithm.start": 0.5}).config) == (1, "L")
    assert second_phase(made("fedavg").config) is None


@given(st.lists(st.dictionaries(st.integers(0, 9), st.floats(-1, 1), min_size=1), min_size=1, max_size=4))
def test_only_rounds_that_all_seeds_have_count(curves: list[dict[int, float]]) -> None:
    found = over_seeds(curves)
    assert set(found) == set.intersection(*(set(curve) for curve in curves))
    for round, (mean, spread) in found.items():
        values = [curve[round] for curve in curves]
        assert min(values) - 1e-12 <= mean <= max(values) + 1e-12
        assert 0 <= spread <= 1 + 1e-12


def test_many_series_can_be_told_apart() -> None:
    looks = {(colour(i), marker(i)) for i in range(3 * len(COLOURS))}
    assert len(looks) == 3 * len(COLOURS)
