"""Tests of differences, against numbers computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.report.significance import holm, signed_rank


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
    assert signed_rank(np.array([0.3 - 0.1 - 0.2, 0.1 + 0.2 - 0.3])) == 1.0


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
