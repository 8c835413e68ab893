"""Epsilon against the formula of the Poisson-sampled normal mechanism, and Poisson cohorts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from rayfl.engine.privacy import epsilon, local_epsilon, promise, without_clients
from rayfl.engine.updates.cohorts import cohort_of
from rayfl.engine.updates.settings import TrainConfig
from rayfl.messages.privacy import PrivacyConfig
from rayfl.randomness import RandomStreams


def by_hand(rate: float, noise: float, rounds: int, delta: float) -> float:
    """Mironov, Talwar, Zhang (2019), section 3.3, for whole orders; converted by Canonne, Kamath, Steinke (2020)."""
    found = []
    for order in range(2, 64):
        terms = [
            math.log(math.comb(order, k))
            + (order - k) * math.log1p(-rate)
            + k * math.log(rate)
            + (k * k - k) / (2 * noise * noise)
            for k in range(order + 1)
        ]
        most = max(terms)
        renyi = rounds * (most + math.log(sum(math.exp(term - most) for term in terms))) / (order - 1)
        found.append(renyi + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1))
    return min(found)


@pytest.mark.parametrize(("per_round", "clients", "noise", "rounds"), [(50, 1000, 1.0, 200), (20, 200, 2.0, 50)])
def test_epsilon_is_that_of_the_sampled_normal_mechanism(
    per_round: int, clients: int, noise: float, rounds: int
) -> None:
    privacy = PrivacyConfig(clip_norm=0.3, noise_multiplier=noise, delta=1e-5)
    train = TrainConfig(clients_per_round=per_round, sampling="poisson")
    expected = by_hand(per_round / clients, noise, rounds, 1e-5)
    assert epsilon(privacy, train, clients, rounds) == pytest.approx(expected, rel=0.02)
    early = epsilon(privacy, train, clients, 10)
    assert f"{early:.2f} at delta = 1e-05 for each client after 10 rounds" in promise(privacy, train, clients, 10)


def test_epsilon_of_everybody_is_that_of_the_normal_mechanism() -> None:
    privacy = PrivacyConfig(clip_norm=1, noise_multiplier=5, delta=1e-5)
    found = epsilon(privacy, TrainConfig(clients_per_round="all"), 100, 10)
    orders = np.linspace(1.1, 63, 5000)
    renyi = 10 * orders / (2 * 5**2)
    expected = renyi + np.log((orders - 1) / orders) - (np.log(1e-5) + np.log(orders)) / (orders - 1)
    assert found == pytest.approx(expected.min(), rel=0.01)


def test_local_epsilon_is_little_above_that_of_the_normal_mechanism_in_closed_form() -> None:
    """Balle and Wang (ICML 2018), equation 6: two changes of length up to C are up to 2 C apart."""
    for noise, times, delta, accountant in ((20.0, 10, 1e-5, "rdp"), (4.0, 3, 1e-3, "rdp"), (4.0, 3, 1e-3, "prv")):
        options: dict[str, Any] = {"noise_multiplier": noise, "delta": delta, "accountant": accountant}
        privacy = PrivacyConfig(clip_norm=1, noise_at="clients", **options)
        apart = 2 * math.sqrt(times) / noise  # in standard deviations of one mechanism that stands for all

        def excess(at: float, apart: float = apart) -> float:
            return float(norm.cdf(apart / 2 - at / apart) - math.exp(at) * norm.cdf(-apart / 2 - at / apart))

        found = local_epsilon(privacy, 100, times)
        assert excess(found) <= delta
        assert excess(found * 0.85 if accountant == "rdp" else found - 0.02) > delta
    assert local_epsilon(privacy, 100, 0) == 0


def test_more_rounds_and_less_noise_cost_more() -> None:
    train = TrainConfig(clients_per_round=30, sampling="poisson")
    one, two = (PrivacyConfig(clip_norm=1, noise_multiplier=noise, delta=1e-4) for noise in (1, 2))
    assert epsilon(one, train, 300, 10) < epsilon(one, train, 300, 20)
    assert epsilon(two, train, 300, 10) < epsilon(one, train, 300, 10)


def test_rounds_without_clients_are_taken_from_delta() -> None:
    privacy = PrivacyConfig(clip_norm=1, noise_multiplier=1, delta=0.02)
    few, many = (TrainConfig(clients_per_round=number, sampling="poisson") for number in (5, 500))
    without = without_clients(few, 10, 10)
    assert without == pytest.approx(10 * 0.5**10)
    left = privacy.model_copy(update={"delta": 0.02 - without})  # at 1000 clients no round is without
    assert epsilon(privacy, few, 10, 10) == pytest.approx(epsilon(left, many, 1000, 10))
    assert PrivacyConfig(clip_norm=1, noise_multiplier=1).delta_of(100) == pytest.approx(100**-1.1)


def test_poisson_cohorts_are_independent_coins() -> None:
    streams = RandomStreams(3)
    cohorts = [cohort_of(streams, round, 40, 10, sampling="poisson") for round in range(400)]
    assert cohorts[5] == cohort_of(RandomStreams(3), 5, 40, 10, sampling="poisson")
    assert all(cohort == sorted(set(cohort)) for cohort in cohorts)
    met = np.zeros((400, 40))
    for round, cohort in enumerate(cohorts):
        met[round, cohort] = 1
    assert met.mean() == pytest.approx(0.25, abs=0.01)
    assert met.sum(1).var() == pytest.approx(40 * 0.25 * 0.75, rel=0.2)  # of a fixed size it would be 0
    assert np.abs(np.corrcoef(met.T) - np.eye(40)).max() < 0.25


def test_everybody_is_in_a_poisson_cohort_of_all() -> None:
    assert cohort_of(RandomStreams(0), 0, 5, "all", sampling="poisson") == [0, 1, 2, 3, 4]
    assert cohort_of(RandomStreams(0), 0, 5, 9, sampling="poisson") == [0, 1, 2, 3, 4]


def test_no_cohort_is_larger_than_all_clients() -> None:
    assert cohort_of(RandomStreams(0), 0, 5, "all", least=7) == [0, 1, 2, 3, 4]
    assert cohort_of(RandomStreams(0), 0, 5, 9, least=7) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("noise", "count"), [(1.0, 5.0), (0.3, 0.2), (9.9, 5.0)])
def test_sum_and_count_together_cost_what_the_sum_alone_does(noise: float, count: float) -> None:
    """The sensitivities, C of the sum and 1/2 of the count, each over its noise, add up in squares."""
    alone = PrivacyConfig(clip_norm=1, noise_multiplier=noise)
    both = PrivacyConfig(clip_norm=1, noise_multiplier=noise, target_quantile=0.5, count_noise=count)
    assert alone.sum_noise_of(100) == noise
    found = both.sum_noise_of(100)
    assert found == pytest.approx((noise**-2 - (2 * count) ** -2) ** -0.5, rel=1e-12)
    assert 1 / found**2 + (0.5 / count) ** 2 == pytest.approx(1 / noise**2, rel=1e-9)
    train = TrainConfig(clients_per_round=30, sampling="poisson")
    assert epsilon(both, train, 300, 20) == epsilon(alone, train, 300, 20)


def test_the_counts_noise_is_a_twentieth_of_the_cohort() -> None:
    private = PrivacyConfig(clip_norm=1, noise_multiplier=1, target_quantile=0.5)
    assert private.count_noise_of(100) == 5
    assert private.model_copy(update={"count_noise": 0.7}).count_noise_of(100) == 0.7
    assert PrivacyConfig(clip_norm=1, target_quantile=0.5).count_noise_of(100) == 0
    assert PrivacyConfig(clip_norm=1, target_quantile=0.5).sum_noise_of(1) == 0
    with pytest.raises(ValueError, match=r"noise of 0.5 alone costs more than noise_multiplier=1 .* above 0.5"):
        private.sum_noise_of(10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 1, "target_quantile": 1}, "target_quantile"),
        ({"clip_norm": 1, "target_quantile": 0}, "target_quantile"),
        ({"target_quantile": 0.5}, "needs a norm to begin with"),
        ({"clip_norm": 1, "clip_lr": 0.1}, "set privacy.target_quantile"),
        ({"clip_norm": 1, "noise_multiplier": 1, "count_noise": 1}, "set privacy.target_quantile"),
        ({"clip_norm": 1, "target_quantile": 0.5, "count_noise": 1}, "makes nothing private"),
        ({"clip_norm": 1, "noise_multiplier": 1, "target_quantile": 0.5, "count_noise": 0}, "count_noise"),
        ({"clip_norm": 1, "target_quantile": 0.5, "clip_lr": 0}, "clip_lr"),
    ],
)
def test_options_of_a_moving_norm_are_refused_where_they_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivacyConfig(**options)


def test_options_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="without a limit on messages"):
        PrivacyConfig(noise_multiplier=1)
    with pytest.raises(ValueError, match="delta without noise"):
        PrivacyConfig(clip_norm=1, delta=0.1)
    for sampling in ("poisson", "cyclic"):
        with pytest.raises(ValueError, match="leave min_clients_per_round out"):
            TrainConfig(sampling=sampling, min_clients_per_round=2)


def test_numerical_composition_is_below_renyi_accounting() -> None:
    train = TrainConfig(clients_per_round=10, sampling="poisson")
    one, other = (
        PrivacyConfig(clip_norm=1, noise_multiplier=1, delta=1e-3, accountant=accountant)
        for accountant in ("rdp", "prv")
    )
    assert 0.6 * epsilon(one, train, 200, 20) < epsilon(other, train, 200, 20) < 0.9 * epsilon(one, train, 200, 20)


@pytest.mark.slow
def test_hardly_any_noise_is_counted_by_renyi_accounting(caplog: pytest.LogCaptureFixture) -> None:
    train = TrainConfig(clients_per_round=100, sampling="poisson")
    one, other = (
        PrivacyConfig(clip_norm=1, noise_multiplier=0.02, delta=0.01, accountant=accountant)
        for accountant in ("rdp", "prv")
    )
    assert epsilon(other, train, 200, 5) == epsilon(one, train, 200, 5)
    assert "privacy.accountant=prv finds no epsilon" in caplog.text


def test_an_accountant_without_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="accountant=prv without noise"):
        PrivacyConfig(clip_norm=1, accountant="prv")
