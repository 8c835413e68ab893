"""The combination of heads: invariants PAC of the quadratic program, fixture G13, and its options."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal

from algorithms.parts.combination import combination_weights, least_on_simplex, pruned

G13_MEANS = np.array([[1.0, 0], [0, 1], [1, 1]])
G13_VARIANCES = np.array([0.1, 0.2, 0.3])

sizes = st.shared(st.integers(1, 7), key="clients")
means = arrays(np.float64, st.tuples(sizes, st.integers(1, 5)), elements=st.floats(-10, 10, width=32))
variances = arrays(np.float64, sizes.map(lambda n: (n,)), elements=st.floats(0, 10, width=32))


def matrix(own: int, h: np.ndarray, v: np.ndarray) -> np.ndarray:
    """P of client ``own``, entry by entry."""
    differences = (h[own] - h).reshape(len(h), -1)
    products: np.ndarray = np.diag(v) + differences @ differences.T
    return products


def value(own: int, a: np.ndarray, h: np.ndarray, v: np.ndarray) -> float:
    """Variance and squared bias of client ``own``."""
    return float((a**2 * v).sum() + ((h[own] - np.tensordot(a, h, 1)) ** 2).sum())


@given(means, variances, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_inv_pac_1_both_forms_of_the_value_agree(h: np.ndarray, v: np.ndarray, random: object) -> None:
    a = np.random.default_rng(len(h)).dirichlet(np.ones(len(h)))
    for own in range(len(h)):
        assert_allclose(a @ matrix(own, h, v) @ a, value(own, a, h, v), rtol=1e-12, atol=1e-12)


@given(means, variances)
@settings(deadline=None, max_examples=150)
def test_inv_pac_2_and_6_a_point_of_the_simplex_no_worse_than_the_own_head_with_kkt(
    h: np.ndarray, v: np.ndarray
) -> None:
    for own, a in enumerate(combination_weights(h, v)):
        assert (a >= 0).all() and abs(a.sum() - 1) < 1e-12
        assert value(own, a, h, v) <= v[own] + 1e-12
        # the multiplier of the sum is 2 a^T P a
        gradient, multiplier = 2 * matrix(own, h, v) @ a, 2 * value(own, a, h, v)
        assert_allclose(gradient[a > 0], multiplier, atol=1e-10)
        assert (gradient[a == 0] >= multiplier - 1e-10).all()


def test_kkt_with_many_clients_and_features_of_any_size() -> None:
    generator = np.random.default_rng(0)
    for scale in (1e-3, 1.0, 1e3):
        h, v = scale * generator.standard_normal((30, 10, 64)), scale**2 * generator.random(30) * 20
        for own, a in enumerate(combination_weights(h, v)):
            products = matrix(own, h, v)
            gradient, least = products @ a, value(own, a, h, v)
            assert_allclose(gradient[a > 0], least, atol=1e-10 * np.abs(products).max())
            assert (gradient[a == 0] >= least - 1e-10 * np.abs(products).max()).all()
            assert (a > 0).sum() > 1


def test_inv_pac_3_equal_means_are_weighted_by_inverse_variance() -> None:
    h, v = np.ones((4, 3, 2)) * 0.7, np.array([0.1, 0.2, 0.4, 3.0])
    assert_allclose(combination_weights(h, v), np.tile((1 / v) / (1 / v).sum(), (4, 1)), atol=1e-12)
    assert_allclose(combination_weights(h, np.full(4, 0.3)), np.full((4, 4), 0.25), atol=1e-12)


def test_inv_pac_4_without_variance_a_client_outside_the_others_hull_keeps_its_head() -> None:
    h = np.array([[3.0, 3.0], [1, 0], [0, 1], [0, 0]])
    weights = combination_weights(h, np.zeros(4))
    assert_allclose(weights[0], [1, 0, 0, 0], atol=1e-12)
    # one inside the hull has no bias either way
    inside = np.array([[0.25, 0.25], [1, 0], [0, 1], [0, 0]])
    assert value(0, combination_weights(inside, np.zeros(4))[0], inside, np.zeros(4)) < 1e-20


def test_g13() -> None:
    weights = combination_weights(G13_MEANS, G13_VARIANCES)[0]
    assert_allclose(weights, [0.925373134328, 0.014925373134, 0.059701492537], atol=1e-9)
    assert_allclose(weights, np.array([62, 1, 4]) / 67, atol=1e-12)
    assert abs(value(0, weights, G13_MEANS, G13_VARIANCES) - 0.092537313433) < 1e-9


def test_a_single_client_keeps_its_head() -> None:
    assert_array_equal(combination_weights(np.ones((1, 3, 2)), np.zeros(1)), [[1.0]])


def test_small_weights_are_dropped() -> None:
    assert_array_equal(pruned(np.array([[0.5, 0.4995, 0.0005], [0.25, 0.75, 0]]), 1e-3)[1], [0.25, 0.75, 0])
    found = pruned(np.array([0.5, 0.4995, 0.0005]), 1e-3)
    assert found[2] == 0
    assert_allclose(found[:2], np.array([0.5, 0.4995]) / 0.9995, atol=1e-15)
    # of more than a thousand alike, none reaches a thousandth
    even = np.full((2, 1250), 1 / 1250)
    assert_allclose(pruned(even, 1e-3), even, rtol=1e-12)


def test_clipped_eigenvalues_change_the_program() -> None:
    exact, same, other = (
        combination_weights(G13_MEANS, G13_VARIANCES / 100, eigenvalue_clip=clip) for clip in (None, 0.0, 0.01)
    )
    assert_allclose(same, exact, atol=1e-10)
    for own, a in enumerate(other):
        values, vectors = np.linalg.eigh(matrix(own, G13_MEANS, G13_VARIANCES / 100))
        clipped = (vectors * np.where(values >= 0.01, values, 0)) @ vectors.T
        assert (values < 0.01).any() and abs(a.sum() - 1) < 1e-12
        gradient = clipped @ a
        assert_allclose(gradient[a > 0], a @ gradient, atol=1e-10)
        assert (gradient >= a @ gradient - 1e-10).all()
    assert np.abs(other - exact).max() > 0.001


@pytest.mark.parametrize("factor", [np.zeros((0, 3)), np.zeros((2, 3))])
def test_without_an_objective_any_point_of_the_simplex_will_do(factor: np.ndarray) -> None:
    a = least_on_simplex(factor)
    assert (a >= 0).all() and abs(a.sum() - 1) < 1e-12
