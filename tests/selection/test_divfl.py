"""DivFL: the greedy choice of its definition, new clients first, and weights of those that stand for others."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rayfl.selection.divfl import DivFL
from rayfl.selection.known import Known
from rayfl.selection.updates import with_updates

CLIENTS = 11


def known(seed: int = 0, heard: int = CLIENTS, size: int = 4, draw: int = 0) -> tuple[Known, np.ndarray]:
    """What is known when the first ``heard`` clients have sent updates, and these."""
    source = np.random.Generator(np.random.Philox(seed))
    points = source.normal(size=(CLIENTS, 3)).astype(np.float32)
    own = with_updates({}, {i: torch.from_numpy(points[i]) for i in range(heard)}, "l2", CLIENTS)
    generator = np.random.Generator(np.random.Philox(1000 + draw))
    return replace(Known.before([5] * CLIENTS), size=size, own=own, generator=generator), points.astype(np.float64)


def uncovered(points: np.ndarray, chosen: list[int]) -> float:
    """G(S) in scalars."""
    return sum(min(math.dist(point, points[i]) for i in chosen) for point in points)


def assert_greedy(found: list[int], points: np.ndarray, able: list[int]) -> None:
    """Each is the best beside those before it; two that are nearest to each other may be equally good."""
    assert len(set(found)) == len(found)
    for place, client in enumerate(found):
        before = found[:place]
        best = min(uncovered(points, [*before, other]) for other in able if other not in before)
        assert uncovered(points, [*before, client]) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_the_choice_is_greedy_in_the_facility_location_function(seed: int) -> None:
    state, points = known(seed)
    found = DivFL().choose(state).tolist()
    assert len(found) == 4
    assert_greedy(found, points, list(range(CLIENTS)))
    best = min(uncovered(points, list(some)) for some in itertools.combinations(range(CLIENTS), 4))
    worst = uncovered(points, found[:1])
    assert worst - uncovered(points, found) >= (1 - 1 / math.e) * (worst - best)  # of a submodular function


def test_rounding_of_updates_does_not_choose_between_equally_good_clients() -> None:
    """As of stacked clients, whose updates have other last bits."""
    for seed in range(40):
        state, points = known(seed, size=8)
        noise = np.random.Generator(np.random.Philox(seed)).uniform(-1, 1, points.shape)
        moved = torch.from_numpy((points * (1 + 3e-7 * noise)).astype(np.float32))
        own = with_updates({}, dict(enumerate(moved)), "l2", CLIENTS)
        assert DivFL().choose(state).tolist() == DivFL().choose(replace(state, own=own)).tolist()


def test_only_clients_that_can_be_asked_are_chosen_and_all_are_represented() -> None:
    state, points = known(3)
    able = [0, 2, 3, 5, 8, 9]
    found = DivFL().choose(replace(state, able=np.array(able))).tolist()
    assert len(found) == 4
    assert set(found) <= set(able)
    assert_greedy(found, points, able)


def test_new_clients_come_first_and_uniformly() -> None:
    chosen = [DivFL().choose(known(heard=5, size=2, draw=draw)[0]) for draw in range(900)]
    assert all(len(set(some.tolist())) == 2 and min(some) >= 5 for some in chosen)
    share = np.bincount(np.concatenate(chosen), minlength=CLIENTS) / 900
    assert share[5:] == pytest.approx(2 / 6, abs=4 * math.sqrt(0.25 / 900))


def test_the_last_new_clients_are_joined_by_greedily_chosen_ones() -> None:
    state, points = known(heard=9)
    found = DivFL(weights="represented").choose(state).tolist()
    assert found[:2] == [9, 10]
    assert len(found) == 4
    assert_greedy(found[2:], points[:9], list(range(9)))


@pytest.mark.parametrize("seed", range(10))
def test_a_client_counts_as_often_as_it_represents_others(seed: int) -> None:
    state, points = known(seed)
    chosen = DivFL().choose(state).tolist()
    found = DivFL(weights="represented").choose(state).tolist()
    nearest = [min(chosen, key=lambda i: math.dist(point, points[i])) for point in points]
    assert sorted(found) == sorted(nearest)
    assert len(found) == CLIENTS


def test_each_of_equal_clients_represents_itself() -> None:
    own = with_updates({}, {i: torch.ones(2) for i in range(4)}, "l2", 4)
    state = replace(Known.before([5] * 4), size=3, own=own)
    assert set(DivFL(weights="represented").choose(state).tolist()) == {0, 1, 2}


def test_the_stochastic_choice_compares_a_few_drawn_clients() -> None:
    state, points = known(4)
    repeated = np.random.Generator(np.random.Philox(1000))
    left, found = np.arange(CLIENTS), DivFL(sampled=3).choose(state).tolist()
    for place in range(4):
        pool = repeated.choice(left, size=3, replace=False).tolist()
        best = min(uncovered(points, [*found[:place], i]) for i in pool)
        assert found[place] in pool
        assert uncovered(points, found[: place + 1]) == pytest.approx(best, rel=1e-9)
        left = left[left != found[place]]
    assert len(found) == 4
    assert DivFL(sampled=CLIENTS).choose(state).tolist() == DivFL().choose(state).tolist()
