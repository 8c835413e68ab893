"""The shortest mean of vectors: against every set of bounds in turn, its optimality, and corner cases."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from algorithms.parts.least_norm import least_norm_weights
from algorithms.parts.simplex import Array


def by_enumeration(products: Array, around: Array, tolerance: float) -> Array:
    """The best of the minimisers with each weight at its lower bound, at its upper bound, or free."""
    low, high = np.maximum(around - tolerance, 0), np.minimum(around + tolerance, 1)
    best, found = np.inf, around
    for kinds in product((0, 1, 2), repeat=len(around)):
        free = np.array(kinds) == 2
        weights = np.where(np.array(kinds) == 0, low, high).astype(float)
        if free.any():
            n = int(free.sum())
            system = np.block([[products[np.ix_(free, free)], np.ones((n, 1))], [np.ones((1, n)), np.zeros((1, 1))]])
            right = np.append(-products[np.ix_(free, ~free)] @ weights[~free], 1 - weights[~free].sum())
            weights[free] = np.linalg.solve(system, right)[:n]
        inside = (weights > low - 1e-13).all() and (weights < high + 1e-13).all() and abs(weights.sum() - 1) < 1e-13
        if inside and (value := weights @ products @ weights) < best:
            best, found = value, weights
    return found


@pytest.mark.parametrize("tolerance", [0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_inv_ln_1_weights_are_the_best_of_all_sets_of_bounds(seed: int, tolerance: float) -> None:
    generator = np.random.default_rng(seed)
    count = int(generator.integers(2, 6))
    vectors = generator.standard_normal((count, 9)) + generator.uniform(0, 1.5)
    if seed % 2:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    around = generator.dirichlet(np.full(count, 2.0))
    found = least_norm_weights(vectors @ vectors.T, around, tolerance)
    assert np.abs(found - by_enumeration(vectors @ vectors.T, around, tolerance)).max() < 1e-12


@pytest.mark.parametrize("seed", range(4))
def test_inv_ln_2_no_vector_turns_away_from_the_shortest_mean(seed: int) -> None:
    vectors = np.random.default_rng(seed).standard_normal((12, 40)) + 0.3
    weights = least_norm_weights(vectors @ vectors.T, np.full(12, 1 / 12), 1)
    mean = weights @ vectors
    assert (vectors @ mean >= mean @ mean * (1 - 1e-10)).all()
    assert weights.min() >= 0 and weights.sum() == pytest.approx(1, abs=1e-13)


def test_inv_ln_3_of_two_vectors_it_is_a_projection() -> None:
    one, other = np.array([3.0, 1.0]), np.array([-1.0, 2.0])
    products = np.array([[one @ one, one @ other], [one @ other, other @ other]])
    share = (other - one) @ other / ((one - other) @ (one - other))
    assert least_norm_weights(products, np.array([0.5, 0.5]), 1) == pytest.approx([share, 1 - share], abs=1e-13)
    assert least_norm_weights(products, np.array([0.9, 0.1]), 0.2) == pytest.approx([0.7, 0.3], abs=1e-13)


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e18])
def test_more_vectors_than_dimensions_have_one_shortest_mean_although_weights_are_many(scale: float) -> None:
    vectors = scale * np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    weights = least_norm_weights(vectors @ vectors.T, np.full(4, 0.25), 1)
    assert weights @ vectors == pytest.approx([0.5 * scale, 0.5 * scale], rel=1e-6)


def test_nothing_to_choose() -> None:
    around = np.array([0.2, 0.8])
    assert least_norm_weights(np.eye(2), around, 0).tolist() == [0.2, 0.8]
    assert least_norm_weights(np.zeros((2, 2)), around, 1).tolist() == [0.2, 0.8]
    assert least_norm_weights(np.eye(1), np.ones(1), 1).tolist() == [1.0]
    still = np.diag([0.0, 1.0])  # one has not moved
    assert least_norm_weights(still, around, 1) == pytest.approx([1.0, 0.0], abs=1e-12)
