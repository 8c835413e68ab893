"""Integers of noise against their exact probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from rayfl.aggregation.discrete_noise import discrete_gaussian, skellam


def assert_drawn_from(found: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square of numbers against the probabilities of -R to R; seeds are fixed, and the level leaves room."""
    reach = len(probabilities) // 2
    assert abs(found).max() <= reach
    expected = probabilities * len(found)
    counted = np.bincount(found + reach, minlength=len(probabilities))
    often = expected > 10
    counts, wanted = (
        np.append(counted[often], counted[~often].sum()),
        np.append(expected[often], expected[~often].sum()),
    )
    assert stats.chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue > 0.001


@pytest.mark.parametrize("deviation", [0.4, 1.0, 3.7, 40.0])
def test_discrete_gaussians_have_their_probabilities(deviation: float) -> None:
    k = np.arange(-12 * int(deviation + 1), 12 * int(deviation + 1) + 1)
    weights = np.exp(-(k**2) / (2 * deviation**2))
    assert_drawn_from(discrete_gaussian(np.random.default_rng(1), deviation, 200_000), weights / weights.sum())


# From a variance of 2,000 on the numbers are not NumPy's.
@pytest.mark.parametrize("variance", [0.3, 9.0, 1999.0, 2000.5])
def test_skellam_numbers_have_their_probabilities(variance: float) -> None:
    reach = int(12 * variance**0.5 + 12)
    exact = special.ive(abs(np.arange(-reach, reach + 1)), variance)
    assert_drawn_from(skellam(np.random.default_rng(2), variance, 200_000), exact)


def test_large_skellam_numbers_are_normal_to_every_digit_that_can_be_seen() -> None:
    for variance in (1e7, 1e12):
        found = skellam(np.random.default_rng(3), variance, 200_000) / variance**0.5
        assert stats.kstest(found, "norm").pvalue > 0.001


def test_sums_of_skellam_numbers_have_the_sum_of_the_variances() -> None:
    generator = np.random.default_rng(4)
    found = sum(skellam(generator, 3.0, 200_000) for _ in range(3))
    assert isinstance(found, np.ndarray)
    assert_drawn_from(found, special.ive(abs(np.arange(-60, 61)), 9.0))


@pytest.mark.parametrize("draw", [discrete_gaussian, skellam])
def test_the_same_stream_gives_the_same_integers(draw: type) -> None:
    for size, width in ((5, 3e4), (0, 3.0), (1, 3e9)):
        one, two = (draw(np.random.default_rng(0), width, size) for _ in range(2))
        assert one.dtype == np.int64 and one.shape == (size,) and np.array_equal(one, two)
