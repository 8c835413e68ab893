"""Tests of differences, against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.report.significance import _tested, holm, left_out, ordered, signed_rank


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        # All of one sign: 2 of the 2^n signs are as extreme.
        ([1, 2, 3, 4, 5], 2 / 32),
        ([-1, -2, -3, -4, -5, -6], 2 / 64),
        # Ranks of the negative ones 1: sums 0 and 1 can be had in one way each, on both sides.
        ([-1, 2, 3, 4, 5], 4 / 32),
        # Negative rank sum 3: {}, {1}, {2}, {3}, {1, 2}: 5 of 32 on each side.
        ([-1, -2, 3, 4, 5], 10 / 32),
        # Zeros are left out.
        ([0, 0, 1, 2, 3, 4, 5], 2 / 32),
        ([0, 0, 0], 1.0),
        ([0.5], 1.0),
    ],
)
def test_signed_ranks_by_hand(differences: list[float], p: float) -> None:
    assert signed_rank(np.array(differences)) == pytest.approx(p)


def test_differences_that_are_equal_but_for_rounding_are_zero() -> None:
    pairs = np.array([[0.3 - 0.1, 0.2], [0.1 + 0.2, 0.3]])
    assert (pairs[:, 0] != pairs[:, 1]).all()
    assert ordered(pairs).tolist() == [0, 0]


def test_equal_differences_have_equal_places_and_infinite_ones_are_the_largest() -> None:
    inf = float("inf")
    pairs = np.array([[0.9, 0.7], [0.1, 0.3], [1, 1.0], [inf, 0], [0, -inf], [-inf, 7], [inf, inf], [5e12, 0], [3, 0]])
    assert abs(pairs[0, 0] - pairs[0, 1]) != abs(pairs[1, 0] - pairs[1, 1])
    assert ordered(pairs).tolist() == [2, -2, 0, 5, 5, -5, 0, 4, 3]


@pytest.mark.parametrize("huge", [1e13, 1e300, float("inf")])
def test_one_huge_value_turns_no_other_client_into_a_tie(huge: float) -> None:
    generator = np.random.default_rng(0)
    worse = generator.uniform(2, 3, 30)
    better = worse - generator.uniform(0.1, 1, 30)
    (before,) = _tested([("a", "b", np.stack([worse, better], 1))])
    worse[0] = huge
    (after,) = _tested([("a", "b", np.stack([worse, better], 1))])
    assert (before.wins, before.losses, before.larger) == (after.wins, after.losses, after.larger) == (30, 0, 1)
    assert before.p == after.p == pytest.approx(2 / 2**30)


def test_a_client_that_diverged_counts_against_its_method() -> None:
    mine, others = np.full(30, 1.0), np.full(30, 1.1)
    mine[:20] = float("inf")
    (test,) = _tested([("mine", "other", np.stack([mine, others], 1))])
    assert (test.pairs, test.wins, test.losses, test.left_out, test.larger) == (30, 20, 10, 0, 1)
    mine[0], mine[1], others[1] = np.nan, np.nan, np.nan
    (test,) = _tested([("mine", "other", np.stack([mine, others], 1))])
    assert (test.pairs, test.wins, test.left_out) == (28, 18, 1)
    assert left_out([test], "clients") == [
        "the test of mine with other leaves out 1 of 29 clients: only one of the two has a number there"
    ]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(-50, 50), min_size=1, max_size=10))
def test_which_method_comes_first_does_not_matter(differences: list[int]) -> None:
    values = np.array(differences) / 50
    assert signed_rank(values) == pytest.approx(signed_rank(-values))
    assert 0 <= signed_rank(values) <= 1


def test_holm_by_hand() -> None:
    # 0.01 x 4, 0.02 x 3, 0.03 x 2, and 0.04 x 1, which may not be below the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_keeps_order_and_is_between_p_and_bonferroni(p_values: list[float]) -> None:
    adjusted = np.array(holm(p_values))
    raw = np.array(p_values)
    assert (adjusted >= raw).all()
    assert (adjusted <= np.minimum(1, raw * len(raw)) + 1e-12).all()
    order = np.argsort(raw, kind="stable")
    assert (np.diff(adjusted[order]) >= 0).all()
