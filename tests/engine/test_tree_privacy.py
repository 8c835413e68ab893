"""Cyclic cohorts, and epsilon where it is known who takes part in which round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.engine.privacy import epsilon, largest_sensitivity, without_clients
from rayfl.engine.updates.cohorts import cohort_of
from rayfl.engine.updates.settings import TrainConfig
from rayfl.messages.privacy import PrivacyConfig
from rayfl.randomness import RandomStreams

CYCLIC = TrainConfig(clients_per_round=10, sampling="cyclic")


def drawn(seed: int, clients: int, size: int, rounds: int) -> np.ndarray:
    """Who takes part, shape (rounds, clients)."""
    met = np.zeros((rounds, clients), dtype=int)
    for round in range(rounds):
        met[round, cohort_of(RandomStreams(seed), round, clients, size, sampling="cyclic")] = 1
    return met


@given(st.integers(0, 99), st.integers(1, 30), st.integers(1, 30), st.integers(1, 40))
def test_cyclic_cohorts_go_round_all_clients(seed: int, clients: int, size: int, rounds: int) -> None:
    size = min(size, clients)
    met = drawn(seed, clients, size, rounds)
    assert (met.sum(1) == size).all()
    assert np.ptp(met.sum(0)) <= 1  # nobody takes part more than once more often than another client
    for one in met.T:
        apart = np.diff(one.nonzero()[0])
        assert set(apart) <= {clients // size, -(-clients // size)}


def test_the_order_is_the_seeds() -> None:
    assert (drawn(3, 40, 7, 9) == drawn(3, 40, 7, 9)).all()
    assert (drawn(3, 40, 7, 9) != drawn(4, 40, 7, 9)).any()
    cohorts = [cohort_of(RandomStreams(0), round, 40, 10, sampling="cyclic") for round in range(5)]
    assert cohorts[0] == cohorts[4] and sorted(client for cohort in cohorts[:4] for client in cohort) == list(range(40))
    assert cohort_of(RandomStreams(0), 3, 5, 9, sampling="cyclic") == [0, 1, 2, 3, 4]
    assert without_clients(CYCLIC, 11, 100) == 0


def changed(met: np.ndarray, noise: str, tree_rounds: int | None) -> float:
    """What the client that changes most changes of all sums that are noised, sum by sum; squared."""
    rounds, clients = met.shape
    length = rounds if tree_rounds is None else tree_rounds
    most = 0
    for client in range(clients):
        total = 0
        for begin in range(0, rounds, length):
            end = min(begin + length, rounds)
            for number, last in enumerate(range(begin + 1, end + 1), 1):
                sizes = [size for size in (1, 2, 4, 8, 16, 32) if number % size == 0]
                if noise != "honaker":  # the largest block that ends here is the one that later prefixes are made of
                    sizes = sizes[:1] if noise == "independent" else sizes[-1:]
                total += sum(met[last - size : last, client].sum() ** 2 for size in sizes)
        most = max(most, int(total))
    return most


@settings(max_examples=60)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 20),
    st.sampled_from(["independent", "tree", "honaker"]),
    st.sampled_from([None, 1, 3, 8]),
)
def test_the_client_that_changes_most_is_found_among_all(
    clients: int, size: int, rounds: int, noise: Any, tree_rounds: int | None
) -> None:
    size = min(size, clients)
    expected = changed(drawn(1, clients, size, rounds), noise, tree_rounds)
    assert largest_sensitivity(noise, tree_rounds, clients, size, rounds) ** 2 == pytest.approx(expected)


@pytest.mark.parametrize(
    ("noise", "tree_rounds", "rounds", "squared"),
    [
        ("independent", None, 20, 2),  # of 100 clients in cohorts of 10, each takes part twice
        ("tree", None, 8, 4),  # once: the first leaf is below nodes of 1, 2, 4 and 8 rounds
        ("honaker", None, 8, 4),
        ("tree", 8, 8, 4),
        ("tree", 10, 20, 8),  # twice, in a tree of its own each
        ("tree", None, 20, 10),  # rounds 1 and 11: once in 1, 1-2, 1-4, 1-8, 11 and 9-12, twice in 1-16
    ],
)
def test_epsilon_is_that_of_one_normal_mechanism(
    noise: Any, tree_rounds: int | None, rounds: int, squared: float
) -> None:
    privacy = PrivacyConfig(clip_norm=1, noise_multiplier=3, noise=noise, tree_rounds=tree_rounds, delta=1e-5)
    orders = np.linspace(1.1, 63, 5000)
    renyi = squared * orders / (2 * 3**2)
    expected = (renyi + np.log((orders - 1) / orders) - (np.log(1e-5) + np.log(orders)) / (orders - 1)).min()
    assert epsilon(privacy, CYCLIC, 100, rounds) == pytest.approx(expected, rel=0.01)


def test_everybodys_noise_may_be_that_of_a_tree() -> None:
    everybody = TrainConfig(clients_per_round="all")
    independent, tree = (
        PrivacyConfig(clip_norm=1, noise_multiplier=9, noise=noise) for noise in ("independent", "tree")
    )  # type: ignore[arg-type]
    assert epsilon(independent, everybody, 50, 1) == pytest.approx(epsilon(tree, everybody, 50, 1), rel=1e-6)
    assert epsilon(independent, everybody, 50, 8) < epsilon(tree, everybody, 50, 8)
    assert largest_sensitivity("tree", None, 50, 50, 8) ** 2 == pytest.approx(4 + 2 * 4 + 16 + 64)


def test_no_epsilon_is_made_up_where_nothing_is_known() -> None:
    tree = PrivacyConfig(clip_norm=1, noise_multiplier=1, noise="tree")
    for sampling in ("fixed", "poisson"):
        with pytest.raises(ValueError, match=f"noise=tree has no epsilon with train.sampling={sampling}"):
            epsilon(tree, TrainConfig(clients_per_round=5, sampling=sampling), 20, 4)  # type: ignore[arg-type]
    moving = PrivacyConfig(clip_norm=1, noise_multiplier=1, target_quantile=0.5, count_noise=1)
    with pytest.raises(ValueError, match="target_quantile has no epsilon"):
        epsilon(moving, CYCLIC, 20, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 1, "noise": "tree"}, "set privacy.noise_multiplier"),
        ({"noise": "honaker"}, "set privacy.noise_multiplier"),
        ({"clip_norm": 1, "noise_multiplier": 1, "tree_rounds": 4}, "set privacy.noise=tree"),
        ({"clip_norm": 1, "noise_multiplier": 1, "noise": "tree", "tree_rounds": 0}, "tree_rounds"),
        ({"clip_norm": 1, "noise_multiplier": 1, "noise": "tree", "target_quantile": 0.5}, "leave target_quantile out"),
    ],
)
def test_options_of_a_tree_are_refused_where_they_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivacyConfig(**options)
