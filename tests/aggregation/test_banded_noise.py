"""Noise of a banded matrix against the matrices themselves, and what one client can change at most."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import sqrtm, toeplitz

from rayfl.aggregation.banded_noise import banded_noise, coefficients, shares, squared_sensitivity
from rayfl.engine.privacy import largest_sensitivity
from rayfl.messages.privacy import PrivacyConfig
from rayfl.randomness import RandomStreams

STREAMS = RandomStreams(5)


def matrix(rounds: int, bands: int) -> np.ndarray:
    """C: Toeplitz, lower triangular, banded; shape (rounds, rounds)."""
    column = np.zeros(rounds)
    known = coefficients(bands)[:rounds]
    column[: len(known)] = known
    return np.tril(toeplitz(column))


def test_all_bands_are_the_square_root_of_the_prefix_sums() -> None:
    ones = np.tril(np.ones((9, 9)))
    root = matrix(9, 9)
    assert root @ root == pytest.approx(ones, abs=1e-12)
    assert root == pytest.approx(np.real(sqrtm(ones)), abs=1e-4)  # of a defective matrix, so few digits
    assert coefficients(5).tolist() == [1, 1 / 2, 3 / 8, 5 / 16, 35 / 128]


@given(rounds=st.integers(1, 70), bands=st.integers(1, 80))
def test_shares_are_the_inverse(rounds: int, bands: int) -> None:
    inverse = np.zeros((rounds, rounds))
    for round in range(rounds):
        inverse[round, : round + 1] = shares(round, bands)[::-1]
    assert matrix(rounds, bands) @ inverse == pytest.approx(np.eye(rounds), abs=1e-10)


@pytest.mark.parametrize("bands", [1, 2, 3, 40])
def test_a_round_takes_part_of_earlier_noise_back(bands: int) -> None:
    """n_t = z_t - c_1 n_(t-1) - ... - c_(b-1) n_(t-b+1), with the noise of each round drawn once and kept."""
    shape, kept = (3, 2), list[np.ndarray]()
    for round in range(12):
        own = STREAMS.generator(f"privacy.banded.w.{shape}", round).standard_normal(shape)
        for back, weight in enumerate(coefficients(bands)[1 : round + 1], 1):
            own = own - weight * kept[round - back]
        kept.append(own)
        assert banded_noise(STREAMS, round, bands)("w", shape) == pytest.approx(own, abs=1e-12)
    assert not np.allclose(banded_noise(STREAMS, 3, bands)("other", shape), kept[3])


def test_one_band_is_independent_noise() -> None:
    assert shares(6, 1).tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert squared_sensitivity(np.array([True, False, True, True]), 1) == 3


@given(
    attended=st.lists(st.booleans(), min_size=1, max_size=9),
    bands=st.integers(1, 12),
)
def test_nobody_changes_more_than_one_whose_changes_point_the_same_way(attended: list[bool], bands: int) -> None:
    there = np.array(attended)
    root = matrix(len(there), bands)
    rounds = np.flatnonzero(there)
    most = 0.0
    for signs in itertools.product((-1, 1), repeat=len(rounds)):
        changed = np.zeros(len(there))
        changed[rounds] = signs
        most = max(most, float(np.square(root @ changed).sum()))
    assert squared_sensitivity(there, bands) == pytest.approx(most, rel=1e-12)


def test_rounds_further_apart_than_the_bands_add_up() -> None:
    """A client in every fourth of twelve rounds, with up to four bands: its columns have no row in common."""
    for bands in range(1, 5):
        expected = 3 * float(np.square(coefficients(bands)).sum())
        assert squared_sensitivity(np.arange(12) % 4 == 0, bands) == pytest.approx(expected, rel=1e-12)
        assert largest_sensitivity("banded", bands, 8, 2, 12) == pytest.approx(math.sqrt(expected), rel=1e-12)


def test_by_default_there_are_as_many_bands_as_rounds_from_one_to_the_next() -> None:
    config = PrivacyConfig(clip_norm=1, noise_multiplier=1, noise="banded")
    assert [config.bands_of(20, size) for size in (3, 5, 20)] == [6, 4, 1]
    assert config.model_copy(update={"bands": 9}).bands_of(20, 5) == 9


@pytest.mark.parametrize("bands", [4, 25, 100])
def test_sums_have_less_noise_than_with_independent_noise_of_the_same_promise(bands: int) -> None:
    rounds, attended = 100, np.arange(100) % 25 == 0
    sums = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(matrix(rounds, bands))
    banded = np.linalg.norm(sums[-1]) * math.sqrt(squared_sensitivity(attended, bands))
    assert banded < 0.6 * math.sqrt(rounds) * math.sqrt(squared_sensitivity(attended, 1))
