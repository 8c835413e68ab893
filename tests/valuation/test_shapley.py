"""Values of games: against means over all orders, by their axioms, and what drawing and truncating them costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from rayfl.valuation.game import Utility, Valued
from rayfl.valuation.section import LeaveOneOut, Measured, Shapley

Worth = Callable[[tuple[int, ...]], float]


def game(players: int, seed: int = 0) -> dict[tuple[int, ...], float]:
    """What each coalition is worth: any numbers."""
    generator = np.random.default_rng(seed)
    sizes = range(players + 1)
    return {one: float(generator.normal()) for size in sizes for one in itertools.combinations(range(players), size)}


def over_all_orders(worth: Worth, players: int) -> np.ndarray:
    """The definition: what players add when they come, on average over all orders."""
    orders = list(itertools.permutations(range(players)))
    found = np.zeros(players)
    for order in orders:
        for place, player in enumerate(order):
            before, after = tuple(sorted(order[:place])), tuple(sorted(order[: place + 1]))
            found[player] += (worth(after) - worth(before)) / len(orders)
    return found


def valued(worth: Worth, players: int, section: Measured | None = None, seed: int = 0) -> Valued:
    utility = Utility(worth, players)
    return (section or Shapley(exact_up_to=16)).valued(utility, np.random.default_rng(seed))


def drawn(**options: object) -> Shapley:
    return Shapley.model_validate({"exact_up_to": 0, "tolerance": None, **options})


@pytest.mark.parametrize("players", [1, 2, 3, 5, 6])
def test_exact_values_are_the_mean_over_all_orders(players: int) -> None:
    worth = game(players).__getitem__
    found = valued(worth, players)
    assert np.abs(found.values - over_all_orders(worth, players)).max() < 1e-12
    assert (found.found, found.evaluations) == ("exact", 2**players)
    assert (found.before, found.after) == (worth(()), worth(tuple(range(players))))


@pytest.mark.parametrize("section", [Shapley(), drawn(passes=1)], ids=["exact", "drawn"])
def test_inv_contribution_1_values_sum_to_what_the_round_has_added(section: Shapley) -> None:
    worth = game(5, seed=1).__getitem__
    found = valued(worth, 5, section)
    assert found.values.sum() == pytest.approx(worth((0, 1, 2, 3, 4)) - worth(()), abs=1e-12)


def test_inv_contribution_2_players_that_add_the_same_have_the_same_value() -> None:
    table = game(5, seed=2)
    swapped = {1: 3, 3: 1}

    def worth(members: tuple[int, ...]) -> float:
        return table[members] + table[tuple(sorted(swapped.get(player, player) for player in members))]

    found = valued(worth, 5).values
    assert abs(found[1] - found[3]) < 1e-12 < abs(found[0] - found[2])


@pytest.mark.parametrize("section", [Shapley(), LeaveOneOut(), drawn(passes=2)], ids=["exact", "without", "drawn"])
def test_inv_contribution_3_a_player_that_adds_nothing_has_no_value(section: Measured) -> None:
    table = game(5, seed=3)
    found = valued(lambda members: table[tuple(player for player in members if player != 2)], 5, section).values
    assert found[2] == 0
    assert (found[[0, 1, 3, 4]] != 0).all()


def test_inv_contribution_4_values_of_a_sum_of_games_are_sums() -> None:
    one, other = game(5, seed=4), game(5, seed=5)
    whole = valued(lambda members: one[members] + 2 * other[members], 5).values
    assert np.abs(whole - valued(one.__getitem__, 5).values - 2 * valued(other.__getitem__, 5).values).max() < 1e-12


def test_inv_contribution_5_values_go_with_players_that_change_places() -> None:
    table, order = game(5, seed=6), (3, 0, 4, 2, 1)
    moved = valued(lambda members: table[tuple(sorted(order[player] for player in members))], 5).values
    assert np.abs(moved - valued(table.__getitem__, 5).values[list(order)]).max() < 1e-12


def test_drawn_values_come_to_the_exact_ones() -> None:
    worth = game(7, seed=7).__getitem__
    exact = valued(worth, 7).values
    errors = [np.abs(valued(worth, 7, drawn(passes=passes)).values - exact).max() for passes in (3, 30, 3000)]
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.02  # a standard deviation of about 0.01 after 21,000 permutations


def test_drawn_values_are_right_on_average() -> None:
    worth = game(4, seed=8).__getitem__
    found = np.array([valued(worth, 4, drawn(passes=1), seed).values for seed in range(400)])
    error = found.std(0, ddof=1) / math.sqrt(len(found))
    assert (np.abs(found.mean(0) - valued(worth, 4).values) < 4 * error).all()


def test_every_client_is_the_first_as_often() -> None:
    found = valued(lambda members: float(bool(members)), 5, drawn(passes=1))  # the first one adds all
    assert np.abs(found.values - 1 / 5).max() < 1e-15
    assert found.permutations == 5


def test_the_same_generator_draws_the_same_values() -> None:
    worth = game(6, seed=9).__getitem__
    one, again, other = (valued(worth, 6, drawn(passes=2), seed).values for seed in (1, 1, 2))
    assert (one == again).all() and (one != other).any()


def test_a_permutation_ends_where_its_clients_are_worth_what_all_are() -> None:
    def two_are_enough(members: tuple[int, ...]) -> float:
        return min(len(members), 2) / 2 + 1e-4 * len(members)

    whole = valued(two_are_enough, 6, drawn(passes=3))
    ended = valued(two_are_enough, 6, drawn(passes=3, within=0.01))
    assert (whole.truncated, ended.truncated) == (0, 18 * 4)
    assert whole.evaluations > ended.evaluations
    assert ended.evaluations <= 2 + 6 + 15  # nobody, all, and coalitions of one and of two
    assert abs(ended.values.sum() - (ended.after - ended.before)) < 0.01


def test_a_round_that_changes_little_is_not_valued() -> None:
    table = {**game(5), (): 0.5, (0, 1, 2, 3, 4): 0.51}
    for between, how in ((0.02, "skipped"), (0.005, "exact"), (None, "exact")):
        found = valued(table.__getitem__, 5, Shapley(between=between))
        assert found.found == how
        assert found.evaluations == (2 if how == "skipped" else 32)
        assert (found.values == 0).all() == (how == "skipped")


def test_draws_end_once_values_are_settled() -> None:
    def additive(members: Sequence[int]) -> float:
        return sum(1.0 + player for player in members)

    settled = valued(additive, 8, Shapley(exact_up_to=0, passes=50, tolerance=0.05))
    assert settled.permutations == 32  # the first whole pass after 30
    assert np.abs(settled.values - np.arange(1.0, 9.0)).max() < 1e-12
    noisy = valued(game(8).__getitem__, 8, Shapley(exact_up_to=0, passes=50, tolerance=1e-9))
    assert noisy.permutations == 400


def test_without_a_client() -> None:
    table = game(4, seed=10)
    found = valued(table.__getitem__, 4, LeaveOneOut())
    everybody = (0, 1, 2, 3)
    for player in everybody:
        others = tuple(other for other in everybody if other != player)
        assert found.values[player] == table[everybody] - table[others]
    assert found.evaluations == 6
    assert valued({(): 1.0, (0,): 3.0}.__getitem__, 1, LeaveOneOut()).values.tolist() == [2.0]


@pytest.mark.parametrize("section", [Shapley(), LeaveOneOut(), drawn(passes=2)], ids=["exact", "without", "drawn"])
@pytest.mark.parametrize("players", [1, 2, 4])
def test_no_more_is_evaluated_than_is_said(section: Measured, players: int) -> None:
    assert valued(game(players).__getitem__, players, section).evaluations <= section.most_evaluations(players)


@pytest.mark.parametrize("section", [Shapley(), LeaveOneOut(), drawn(passes=1)], ids=["exact", "without", "drawn"])
def test_an_undefined_utility_leaves_no_values(section: Measured) -> None:
    table = {**game(3), (0, 1): math.nan}
    found = valued(table.__getitem__, 3, section)
    assert found.found == "undefined" and np.isnan(found.values).all()
