"""How well losses tell members from others, against counts by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfl.metrics.membership import membership

LOSSES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.7, 2.0, 9.0]), min_size=1, max_size=12)


@given(LOSSES, LOSSES)
def test_scores_are_counts_over_pairs_and_thresholds(members: list[float], others: list[float]) -> None:
    found = membership(np.array(members), np.array(others))
    pairs = [1.0 if m < o else 0.5 if m == o else 0.0 for m in members for o in others]
    thresholds = [-np.inf, *sorted({*members, *others})]
    rates = [(np.mean([m <= t for m in members]), np.mean([o <= t for o in others])) for t in thresholds]
    assert (found.members, found.others) == (len(members), len(others))
    assert found.auc == pytest.approx(np.mean(pairs))
    assert found.advantage == pytest.approx(max(true - false for true, false in rates))
    assert found.at_low_rate == pytest.approx(max(true for true, false in rates if false <= 0.01))


def test_the_ends() -> None:
    low, high = np.arange(3.0), np.arange(3.0, 7.0)
    told = membership(low, high)
    assert (told.auc, told.advantage, told.at_low_rate) == (1, 1, 1)
    turned = membership(high, low)
    assert (turned.auc, turned.advantage, turned.at_low_rate) == (0, 0, 0)
