"""TiFL: tiers by speed, shares that are fixed or adapted, credits, and what cannot be."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rayfl.params import Tree
from rayfl.selection.known import Known
from rayfl.selection.tifl import TiFL

SECONDS = np.array([9.0, 1, 5, 2, 8, 3, 7, 4, 6])  # tiers of three: {1, 3, 5}, {2, 7, 8}, {0, 4, 6}
TIERS = [2, 0, 1, 0, 2, 0, 2, 1, 1]


def known(round: int = 0, own: Tree | None = None, draw: int = 0, **changes: Any) -> Known:
    source = np.random.Generator(np.random.Philox(draw))
    found = replace(Known.before([5] * 9), round=round, size=2, seconds=SECONDS, own=own or {}, generator=source)
    return replace(found, **changes)


def tier(strategy: TiFL, state: Known) -> int:
    """The tier of a choice."""
    (found,) = {TIERS[client] for client in strategy.choose(state).tolist()}
    return found


def test_tiers_are_of_clients_of_equal_speed() -> None:
    assert TiFL(tiers=3).tier_of(known()).tolist() == TIERS
    uneven = TiFL(tiers=4).tier_of(known())
    assert sorted(Counter(uneven.tolist()).values()) == [2, 2, 2, 3]
    assert (np.diff(uneven[np.argsort(SECONDS)]) >= 0).all()
    assert TiFL(tiers=2).tier_of(known(seconds=np.ones(9))).tolist() == [0] * 5 + [1] * 4


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**20), there=st.integers(1, 9), size=st.integers(1, 4), tiers=st.integers(2, 4))
def test_choices_are_different_clients_of_one_tier_that_can_be_asked(
    seed: int, there: int, size: int, tiers: int
) -> None:
    able = np.sort(np.random.Generator(np.random.Philox(seed)).choice(9, there, replace=False))
    size = min(size, there)
    strategy, state = TiFL(tiers=tiers), known(draw=seed + 1, able=able, size=size)
    found = strategy.choose(state).tolist()
    whole = strategy.tier_of(state)
    (chosen,) = {int(whole[client]) for client in found}
    assert len(set(found)) == len(found) == min(size, int((whole[able] == chosen).sum()))
    assert set(found) <= set(able.tolist())
    assert found == strategy.choose(known(draw=seed + 1, able=able, size=size)).tolist()


def test_fixed_shares_are_how_often_a_tier_is_chosen() -> None:
    strategy = TiFL(tiers=3, shares=(6.0, 3.0, 1.0))
    assert strategy.asked == "nobody"
    found = Counter(tier(strategy, known(draw=draw)) for draw in range(2000))
    for place, share in enumerate((0.6, 0.3, 0.1)):
        assert abs(found[place] / 2000 - share) < 4 * math.sqrt(share * (1 - share) / 2000)
    assert TiFL.model_validate(strategy.model_dump()) == strategy  # as a run's folder has it
    never = TiFL(tiers=3, shares=(0.0, 1.0, 1.0))
    assert {tier(never, known(draw=draw)) for draw in range(50)} == {1, 2}
    assert never.own_after(known(), [1], {}) == {}


def test_a_tier_without_anybody_who_can_be_asked_is_passed_over() -> None:
    strategy = TiFL(tiers=3, shares=(1.0, 0.0, 0.0))
    assert tier(strategy, known()) == 0
    assert {tier(strategy, known(draw=draw, able=np.array([0, 2, 4]))) for draw in range(40)} == {1, 2}


def test_credits_run_out() -> None:
    strategy = TiFL(tiers=3, credits=(2, 1, 0))
    own: Tree = {}
    found = []
    for round in range(3):
        state = known(round, own, draw=round)
        cohort = strategy.choose(state).tolist()
        own = strategy.own_after(state, cohort, {})
        found.append(TIERS[cohort[0]])
    assert Counter(found) == {0: 2, 1: 1}
    assert own["credits"].tolist() == [0, 0, 0]
    assert {tier(strategy, known(3, own, draw=draw)) for draw in range(60)} == {0, 1, 2}  # nobody has any: all alike
    assert strategy.own_after(known(3, own), [], {}) == own  # nobody took part


def adapted(losses: list[float], before: list[float] | None, cohort: list[int], round: int = 9, **options: Any) -> Tree:
    """What is remembered after a round of which each client of tier i has the loss at place i."""
    own: Tree = {} if before is None else {"losses": torch.tensor(before, dtype=torch.float64)}
    told = np.array([losses[place] for place in TIERS])
    return TiFL(tiers=3, **options).own_after(known(round, own, losses=told), cohort, {})


def test_shares_are_ranked_where_the_last_tier_is_no_better_than_before() -> None:
    worse = adapted([2.0, 1.0, 3.0], [2.0, 5.0, 5.0], [1, 3])
    assert worse["shares"].tolist() == pytest.approx([1 / 3, 0, 2 / 3])
    assert worse["losses"].tolist() == [2.0, 1.0, 3.0]
    better = adapted([2.0, 1.0, 3.0], [2.1, 0.5, 0.5], [1, 3])
    assert better["shares"].tolist() == pytest.approx([1 / 3] * 3)
    assert better["losses"].tolist() == [2.0, 1.0, 3.0]
    first = adapted([2.0, 1.0, 3.0], None, [1, 3])
    assert first["shares"].tolist() == pytest.approx([1 / 3] * 3) and first["losses"].tolist() == [2.0, 1.0, 3.0]
    between = adapted([2.0, 1.0, 3.0], [1.0, 1.0, 1.0], [1, 3], round=8)
    assert between["shares"].tolist() == pytest.approx([1 / 3] * 3) and between["losses"].tolist() == [1.0, 1.0, 1.0]


def test_tiers_without_credits_get_no_share_and_those_that_have_told_nothing_the_greatest() -> None:
    spent = adapted([2.0, 1.0, 3.0], [1.0, 1.0, 1.0], [0], credits=(4, 4, 1))
    assert spent["shares"].tolist() == [1, 0, 0] and spent["credits"].tolist() == [4, 4, 0]
    last = adapted([2.0, 1.0, 3.0], [1.0, 1.0, 1.0], [0], credits=(4, 0, 1))
    assert last["shares"].tolist() == [1, 0, 0]
    silent = adapted([2.0, 1.0, math.nan], [1.0, 1.0, 1.0], [1])
    assert silent["shares"].tolist() == pytest.approx([1 / 3, 0, 2 / 3])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shares": (1.0, 2.0)}, "shares has 2 numbers, but there are 5 tiers"),
        ({"tiers": 2, "credits": (1, 2, 3)}, "credits has 3 numbers, but there are 2 tiers"),
        ({"tiers": 2, "shares": (0.0, 0.0)}, "shares are all 0"),
        ({"tiers": 2, "credits": (0, 0)}, "credits are all 0"),
        ({"tiers": 2, "shares": (1.0, 0.0), "interval": 5}, "interval is for shares that are adapted"),
        ({"tiers": 2, "shares": (1.0, 0.0), "credits": (0, 5)}, "no tier has both a share and a credit"),
        ({"tiers": 1}, "greater than or equal to 2"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TiFL(**options)
