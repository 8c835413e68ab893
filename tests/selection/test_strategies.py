"""Each strategy chooses as its paper says, given what is known of clients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rayfl.errors import ConfigError
from rayfl.selection.known import Known
from rayfl.selection.oort import Oort
from rayfl.selection.strategies import Active, Custom, PowerOfChoice
from rayfl.selection.strategy import Strategy, drawn

CLIENTS = 12


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(seed))


def known(seed: int = 0, unknown: int = 0, **changes: Any) -> Known:
    """Twelve clients of various sizes; the first ``unknown`` of them have never taken part."""
    source = generator(seed)
    new = np.arange(CLIENTS) < unknown
    losses = np.where(new, np.nan, source.uniform(0.1, 4, CLIENTS))
    found = replace(
        Known.before(source.integers(5, 60, CLIENTS)),
        round=9,
        size=4,
        losses=losses,
        squares=losses**2 * source.uniform(1, 2, CLIENTS),
        times=np.where(new, 0, source.integers(1, 6, CLIENTS)),
        last=np.where(new, -1, source.integers(0, 9, CLIENTS)),
        generator=generator(seed + 1000),
    )
    return replace(found, **changes)


STRATEGIES: list[Strategy] = [
    PowerOfChoice(candidates=6),
    PowerOfChoice(candidates=6, losses="last"),
    Active(),
    Active(dropped=0, uniform=0),
    Oort(),
    Oort(exploration=0.3, least_exploration=0.1, most_rounds=3, preferred_s=2.0),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: f"{strategy.name}")
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    unknown=st.integers(0, CLIENTS),
    size=st.integers(1, 7),
    there=st.integers(7, CLIENTS),
    round=st.integers(0, 300),
)
def test_choices_are_different_clients_that_can_be_asked(
    strategy: Strategy, seed: int, unknown: int, size: int, there: int, round: int
) -> None:
    able = np.sort(generator(seed).choice(CLIENTS, there, replace=False))
    seconds = generator(seed + 1).uniform(0.1, 9, CLIENTS)
    state = known(seed, unknown, able=able, size=size, round=round, seconds=seconds)
    found = strategy.choose(state)
    assert len(set(found.tolist())) == len(found) == size
    assert set(found.tolist()) <= set(able.tolist())
    again = strategy.choose(replace(state, generator=generator(seed + 1000)))
    assert found.tolist() == again.tolist()


def test_power_of_choice_takes_the_greatest_losses_of_its_candidates() -> None:
    state = known()
    candidates = PowerOfChoice(candidates=7).candidates_of(state)
    assert len(set(candidates.tolist())) == 7
    found = PowerOfChoice(candidates=7).choose(replace(state, able=candidates))
    expected = sorted(candidates.tolist(), key=lambda client: -state.losses[client])[:4]
    assert found.tolist() == expected


def test_power_of_choice_draws_candidates_in_the_ratio_of_samples() -> None:
    state = known(samples=np.array([1, 3] + [0] * (CLIENTS - 2)), size=1)
    draws = [
        PowerOfChoice(candidates=1).candidates_of(replace(state, generator=generator(seed)))[0] for seed in range(2000)
    ]
    share = np.bincount(draws, minlength=CLIENTS) / len(draws)
    assert share[2:].sum() == 0
    assert share[1] == pytest.approx(0.75, abs=4 * math.sqrt(0.75 * 0.25 / 2000))


def test_clients_that_never_took_part_come_first_by_last_losses() -> None:
    state = known(unknown=3)
    found = PowerOfChoice(candidates=CLIENTS, losses="last").choose(state)
    assert set(found.tolist()[:3]) == {0, 1, 2}
    assert found[3] == int(np.nanargmax(state.losses))


def test_active_drops_low_valuations_and_draws_by_their_exponentials() -> None:
    strategy = Active(dropped=0.75, sharpness=0.1, uniform=0)
    state = known(size=1)
    values = np.sqrt(state.samples) * state.losses
    left = np.argsort(values)[9:]
    draws = [strategy.choose(replace(state, generator=generator(seed)))[0] for seed in range(3000)]
    share = np.bincount(draws, minlength=CLIENTS) / len(draws)
    expected = np.exp(0.1 * values[left])
    expected /= expected.sum()
    assert share[np.argsort(values)[:9]].sum() == 0
    assert share[left] == pytest.approx(expected, abs=4 * math.sqrt(0.25 / 3000))


def test_active_draws_a_share_uniformly_and_new_clients_only_so() -> None:
    state = known(unknown=8)
    draws = [Active(dropped=0, uniform=0.5).choose(replace(state, generator=generator(seed))) for seed in range(99)]
    assert {int(client) for draw in draws for client in draw[:2]} == {8, 9, 10, 11}  # two by valuations
    assert {int(client) for draw in draws for client in draw[2:]} == set(range(CLIENTS))


def plain_scores(strategy: Oort, state: Known, preferred: float | None) -> list[float]:
    """Oort's scores in scalars, of clients that have all taken part."""
    utilities = [n * math.sqrt(square) for n, square in zip(state.samples, state.squares, strict=True)]
    order = sorted(utilities)
    place = strategy.clip * (len(order) - 1)
    below = math.floor(place)
    most = order[below] + (place - below) * (order[min(below + 1, len(order) - 1)] - order[below])
    utilities = [min(value, most) for value in utilities]
    if strategy.scaled:
        utilities = [(value - min(order)) / (most - min(order)) for value in utilities]
    scores = []
    for client, value in enumerate(utilities):
        score = value + math.sqrt(0.1 * math.log(state.round + 1) / (state.last[client] + 1))
        if preferred is not None and state.seconds[client] > preferred:
            score *= (preferred / state.seconds[client]) ** strategy.penalty
        scores.append(score)
    return scores


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("preferred", [None, 3.0])
def test_scores_of_oort_are_those_of_its_definition(scaled: bool, preferred: float | None) -> None:
    strategy = Oort(scaled=scaled, preferred_s=preferred, clip=0.9)
    state = known(seconds=generator(5).uniform(1, 9, CLIENTS))
    assert strategy.scores(state) == pytest.approx(plain_scores(strategy, state, preferred), rel=1e-12)


def test_oort_exploits_the_best_and_explores_new_clients() -> None:
    strategy = Oort(exploration=0.5, exploration_decay=1.0, cut_off=1.0)
    state = known(unknown=5)
    scores = strategy.scores(state)
    assert np.isnan(scores[:5]).all()
    best = set(np.argsort(-np.nan_to_num(scores, nan=-1))[:2].tolist())
    for seed in range(50):
        found = set(strategy.choose(replace(state, generator=generator(seed))).tolist())
        assert best <= found
        assert len(found & set(range(5))) == 2


def test_oort_explores_less_from_round_to_round_and_then_nobody_is_new() -> None:
    strategy = Oort(exploration=0.9, exploration_decay=0.5, least_exploration=0.25)
    for round, new in ((0, 4), (1, 2), (2, 1), (50, 1)):  # epsilon: 0.9, 0.45, then 0.25
        found = strategy.choose(known(unknown=6, round=round))
        assert len(set(found.tolist()) & set(range(6))) == new
    assert len(strategy.choose(known(unknown=0, round=0))) == 4


def test_oort_prefers_fast_new_clients() -> None:
    seconds = np.ones(CLIENTS)
    seconds[0] = 0.2
    state = known(unknown=CLIENTS, size=1, seconds=seconds)
    draws = [Oort().choose(replace(state, generator=generator(seed)))[0] for seed in range(2000)]
    share = np.mean(np.array(draws) == 0)
    assert share == pytest.approx(5 / 16, abs=4 * math.sqrt(0.25 / 2000))


def test_the_pacer_of_oort_gives_more_time_when_utilities_fall() -> None:
    strategy = Oort(preferred_s=2.0, pacer_step_s=0.5, pacer_rounds=2)
    own: dict[str, Any] = {}
    found = []
    for round, square in enumerate((9.0, 9.0, 1.0, 1.0, 4.0, 4.0, 0.25)):
        state = known(round=round, own=own, squares=np.full(CLIENTS, square), samples=np.full(CLIENTS, 10))
        own = strategy.own_after(state, [0, 1], {})
        found.append(float(own["preferred_s"]))
    assert found == [2.0, 2.0, 2.0, 2.5, 2.5, 2.5, 2.5]  # 2 x 60 then 2 x 20: falls; then 2 x 40: rises
    assert own["utilities"].tolist() == [20.0, 40.0, 40.0, 10.0]
    moved = replace(known(seconds=np.full(CLIENTS, 2.4)), own={"preferred_s": torch.tensor(2.5, dtype=torch.float64)})
    assert strategy.scores(moved) == pytest.approx(plain_scores(strategy, moved, 2.5), rel=1e-12)


def test_oort_retires_clients_that_were_there_often() -> None:
    strategy = Oort(most_rounds=3, exploration=0, least_exploration=0, cut_off=0)
    times = np.array([9, 9, 9, 9, 9, 9, 1, 1, 1, 1, 1, 1])
    for seed in range(30):
        assert min(strategy.choose(known(times=times, generator=generator(seed)))) >= 6
    few = np.array([9, 5, 9, 9, 9, 9, 9, 9, 9, 1, 1, 1])
    assert sorted(strategy.choose(known(times=few))) == [1, 9, 10, 11]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pacer_step_s": 1.0}, "pacer_step_s moves preferred_s"),
        ({"exploration": 0.1}, "least_exploration is 0.2, above exploration, 0.1"),
        ({"exploration_decay": 0.0}, "exploration_decay"),
    ],
)
def test_options_of_oort_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Oort(**options)


def first(known: Known) -> list[int]:
    return [int(client) for client in known.able[: known.size]]


def twice(known: Known) -> list[int]:
    return [1, 1]


def too_many(known: Known) -> np.ndarray:
    return known.able


def strange(known: Known) -> list[int]:
    return [CLIENTS]


def words(known: Known) -> str:
    return "all"


def fails(known: Known) -> list[int]:
    raise ZeroDivisionError("one by zero")


def test_a_function_of_ones_own_chooses() -> None:
    assert Custom(function=f"{__name__}:first").choose(known(able=np.arange(3, 9))).tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("twice", "a client is there twice"),
        ("too_many", "1 to 4"),
        ("strange", "client 12 cannot be asked"),
        ("words", "not 'all'"),
        ("fails", "fails: ZeroDivisionError: one by zero"),
        ("missing", "has no 'missing'"),
    ],
)
def test_what_a_function_of_ones_own_returns_is_checked(function: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Custom(function=f"{__name__}:{function}").choose(known())


def test_clients_without_weight_are_drawn_last() -> None:
    found = drawn(generator(1), np.arange(6), np.array([0.0, 1.0, 0.0, 2.0, 0.0, 1.0]), 4)
    assert set(found[:3].tolist()) == {1, 3, 5}
    assert len(set(found.tolist())) == 4
    assert len(drawn(generator(1), np.arange(3), np.zeros(3), 9)) == 3


def test_what_is_known_survives_a_commit() -> None:
    state = known(unknown=2, own={"utilities": torch.arange(3.0)})
    kept = state.told({0: (1.5, 3.0)}).after([0, 5])
    back = Known.remembered(kept.memory("oort"), "oort", state.samples)
    assert back.losses[0] == 1.5
    assert back.squares[0] == 3.0
    assert np.isnan(back.losses[1])
    assert back.times[0] == 1
    assert back.times[5] == state.times[5] + 1
    assert back.last[[0, 5]].tolist() == [9, 9]
    assert back.own["utilities"].tolist() == [0, 1, 2]
    assert np.isnan(Known.remembered(kept.memory("oort"), "active", state.samples).losses).all()
