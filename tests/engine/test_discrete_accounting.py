"""Bounds of Renyi divergences against those of the exact distributions, summed up number by number."""

from __future__ import annotations

import math
from functools import reduce
from itertools import product

import numpy as np
import pytest
from scipy import special

from rayfl.engine.discrete_accounting import distributed_epsilon, excess, gaussian_renyi, skellam_renyi
from rayfl.messages.compressors import SecureAggregation
from rayfl.messages.privacy import PrivacyConfig


def exact(probabilities: np.ndarray, shift: int, order: float) -> float:
    """D_alpha of noise about ``shift`` from the same noise about 0; probabilities are of -R to R."""
    moved, still = probabilities[: len(probabilities) - shift], probabilities[shift:]
    there = (moved > 0) & (still > 0)
    terms = order * np.log(moved[there]) + (1 - order) * np.log(still[there])
    return float(special.logsumexp(terms) / (order - 1))


def skellam_probabilities(variance: float) -> np.ndarray:
    reach = int(20 * variance**0.5 + 20)
    found: np.ndarray = special.ive(abs(np.arange(-reach, reach + 1)), variance)
    return found


def gaussian_probabilities(deviation: float, count: int = 1) -> np.ndarray:
    reach = int(25 * deviation + 8)
    one = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * deviation**2))
    return reduce(np.convolve, [one / one.sum()] * count)


@pytest.mark.parametrize("variance", [2.0, 30.0, 400.0])
def test_inv_bound_1_skellam_noise_hides_no_less_than_its_bound_says(variance: float) -> None:
    chances = skellam_probabilities(variance)
    for shift, order in product((1, 2, 5), (2, 3, 8)):
        bound = skellam_renyi(np.array([float(order)]), shift, shift, variance)[0]
        found = exact(chances, shift, order)
        assert found <= bound * (1 + 1e-9)
        if variance > 10:
            assert bound <= found * (1 + 2.5 * (1 + order) / variance)


@pytest.mark.parametrize(("deviation", "count"), [(0.45, 4), (0.7, 6), (1.0, 3), (3.0, 8)])
def test_inv_bound_2_sums_of_discrete_gaussians_hide_no_less_than_their_bound_says(
    deviation: float, count: int
) -> None:
    chances = gaussian_probabilities(deviation, count)
    for shift, order in product((1, 2, 4), (1.1, 2.0, 9.0)):
        bound = gaussian_renyi(np.array([order]), shift, shift, deviation, count, 1)[0]
        found = exact(chances, shift, order)
        assert found <= bound * (1 + 1e-9)
        if deviation >= 1:
            assert bound <= found * 1.01


def test_inv_bound_3_of_several_entries_the_bound_is_above_the_sum_over_them() -> None:
    change = [3, 1, 1, 0, 0, 0, 0, 0]
    norm, total = math.sqrt(sum(one**2 for one in change)), sum(change)
    for order in (2.0, 5.0):
        orders = np.array([order])
        found = sum(exact(skellam_probabilities(20.0), one, order) for one in change if one)
        assert found <= skellam_renyi(orders, norm, total, 20.0)[0] <= 1.5 * found
        for deviation in (0.5, 1.5):
            found = sum(exact(gaussian_probabilities(deviation, 5), one, order) for one in change if one)
            bound = gaussian_renyi(orders, norm, total, deviation, 5, len(change))[0]
            assert found <= bound and (deviation < 1 or bound <= 1.01 * found)


@pytest.mark.parametrize(("deviation", "count"), [(0.4, 3), (0.5, 10), (0.8, 5)])
def test_tau_is_above_what_sums_and_a_discrete_gaussian_of_their_variance_differ_by(
    deviation: float, count: int
) -> None:
    several, one = gaussian_probabilities(deviation, count), gaussian_probabilities(deviation * math.sqrt(count))
    reach = int(5 * deviation * math.sqrt(count))
    several, one = (chances[len(chances) // 2 - reach : len(chances) // 2 + reach + 1] for chances in (several, one))
    most = float(abs(np.log(several / one)).max())
    assert 0 < most <= excess(deviation, count) / 2
    assert excess(deviation, 1) == 0, "of one there is no sum"


def by_hand(renyi: np.ndarray, orders: np.ndarray, delta: float) -> float:
    """Canonne, Kamath, Steinke (2020), Proposition 12."""
    found = renyi + np.log((orders - 1) / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    return float(found.min())


FINE = SecureAggregation(clip=0.05, bits=16)


def privacy(mechanism: str, noise: float) -> PrivacyConfig:
    return PrivacyConfig(clip_norm=0.5, noise_multiplier=noise, mechanism=mechanism, delta=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("mechanism", ["skellam", "discrete_gaussian"])
def test_fine_levels_cost_what_normal_noise_costs(mechanism: str) -> None:
    orders = np.arange(2.0, 4000)
    for noise, times in ((1.0, 1), (5.0, 20), (20.0, 10)):
        normal = by_hand(times * orders / (2 * noise**2), orders, 1e-5)
        found = distributed_epsilon(privacy(mechanism, noise), FINE, 20, 100, 1000, times)
        assert normal * (1 - 1e-3) <= found <= normal * 1.01


@pytest.mark.parametrize("mechanism", ["skellam", "discrete_gaussian"])
def test_inv_monotone_1_epsilon_grows_with_rounds_entries_and_coarser_levels_and_falls_with_noise(
    mechanism: str,
) -> None:
    coarse = SecureAggregation(clip=0.5, bits=3)

    def epsilon(noise: float = 2.0, rule: SecureAggregation = coarse, entries: int = 1000, times: int = 3) -> float:
        return distributed_epsilon(privacy(mechanism, noise), rule, 10, 100, entries, times)

    assert epsilon(times=0) == 0 < epsilon(times=1) < epsilon() < epsilon(times=4)
    assert epsilon(noise=3.0) < epsilon() < epsilon(entries=2000)
    assert epsilon(rule=FINE) < epsilon()


def test_a_larger_cohort_has_smaller_shares_of_discrete_gaussian_noise_which_cost_more() -> None:
    coarse = SecureAggregation(clip=0.5, bits=2)
    small, large = (distributed_epsilon(privacy("discrete_gaussian", 1.0), coarse, n, 100, 100, 1) for n in (4, 16))
    assert small < large
    one, other = (distributed_epsilon(privacy("skellam", 1.0), coarse, n, 100, 100, 1) for n in (4, 16))
    assert one == other
