"""Projection onto the simplex, principal coordinates, energy and the choice of the scale."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal
from scipy.optimize import minimize
from sklearn.decomposition import PCA

from algorithms.parts import simplex
from algorithms.parts.simplex import (
    principal_coordinates,
    project_onto_simplex,
    riesz_energy,
    scale_candidates,
    spread_on_simplex,
)
from algorithms.parts.simplex_sampling import sample_simplex

G2_ROWS = np.array([[0.5, -0.2, 0.1], [-0.4, 0.3, 0.0], [-0.1, -0.1, -0.1]])

finite_rows = arrays(np.float64, st.tuples(st.integers(1, 4), st.integers(1, 6)), elements=st.floats(-5, 5, width=32))
scales = st.floats(0.01, 4)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# --- projection -----------------------------------------------------------------------------------------------------


def test_g1_projection() -> None:
    kappa = np.array([[0.5, -0.2, 0.1]])
    for z, expected in ((1.0, [0.7, 0.0, 0.3]), (0.3, [0.3, 0.0, 0.0]), (0.1, [0.1, 0.0, 0.0])):
        assert_allclose(project_onto_simplex(kappa, z), [expected], atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(finite_rows, scales)
def test_inv_flo_6_kkt_conditions(rows: np.ndarray, z: float) -> None:
    projected = project_onto_simplex(rows, z)
    assert (projected >= 0).all()
    assert_allclose(projected.sum(1), z, atol=1e-12)
    for kappa, beta in zip(rows, projected, strict=True):
        support = beta > 0
        threshold = (kappa - beta)[support]
        assert_allclose(threshold, threshold[0], atol=1e-12)
        assert (kappa[~support] <= threshold[0] + 1e-12).all()
        if not support.all():
            assert kappa[support].min() >= kappa[~support].max()


@settings(max_examples=40, deadline=None)
@given(finite_rows, scales, st.floats(-3, 3), st.randoms(use_true_random=False))
def test_inv_flo_6_symmetries(rows: np.ndarray, z: float, shift: float, random: object) -> None:
    projected = project_onto_simplex(rows, z)
    assert_allclose(project_onto_simplex(projected, z), projected, atol=1e-12)
    assert_allclose(project_onto_simplex(rows + shift, z), projected, atol=1e-12)
    assert_allclose(projected / z, project_onto_simplex(rows / z, 1.0), atol=1e-9)
    order = list(range(rows.shape[1]))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert_allclose(project_onto_simplex(rows[:, order], z), projected[:, order], atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), scales, st.integers(0, 2**32 - 1))
def test_inv_flo_6_non_expansive(d: int, z: float, seed: int) -> None:
    a, b = generator(seed).normal(size=(2, 5, d))
    moved = np.linalg.norm(project_onto_simplex(a, z) - project_onto_simplex(b, z), axis=1)
    assert (moved <= np.linalg.norm(a - b, axis=1) + 1e-12).all()


@pytest.mark.parametrize("d", [2, 3, 4])
def test_inv_flo_6_optimal_against_a_solver(d: int) -> None:
    for kappa, z in zip(generator(d).normal(size=(6, d)), (0.2, 0.5, 1.0, 1.0, 2.0, 3.0), strict=True):
        solved = minimize(
            lambda beta, kappa=kappa: ((beta - kappa) ** 2).sum(),
            np.full(d, z / d),
            jac=lambda beta, kappa=kappa: 2 * (beta - kappa),
            bounds=[(0, None)] * d,
            constraints={"type": "eq", "fun": lambda beta, z=z: beta.sum() - z, "jac": np.ones_like},
            method="SLSQP",
            options={"ftol": 1e-14},
        )
        assert solved.success
        assert_allclose(project_onto_simplex(kappa[None], z)[0], solved.x, atol=1e-6)


def test_inv_flo_7_limits_of_the_scale() -> None:
    rows = np.array([[0.5, -0.2, 0.1], [0.3, 0.3, -1.0]])
    assert_allclose(project_onto_simplex(rows, 1e9) / 1e9, np.full((2, 3), 1 / 3), atol=1e-8)
    assert_allclose(project_onto_simplex(rows, 1e-9) / 1e-9, [[1, 0, 0], [0.5, 0.5, 0]], atol=1e-6)
    kappa = generator(7).normal(size=(5, 4))
    distance = [((project_onto_simplex(kappa, z) / z - 0.25) ** 2).sum(1) for z in np.geomspace(1e-3, 1e3, 40)]
    assert (np.diff(distance, axis=0) <= 1e-12).all()


# --- principal coordinates ------------------------------------------------------------------------------------------


def signals(k: int = 9, features: int = 30, seed: int = 0) -> np.ndarray:
    return generator(seed).normal(size=(k, features)) * np.linspace(2, 0.1, features)


def test_inv_flo_8_offsets_cancel() -> None:
    updates, start = signals(), generator(1).normal(size=30)
    assert_allclose(principal_coordinates(updates + start, 4), principal_coordinates(updates, 4), atol=1e-10)


@pytest.mark.parametrize("components", [1, 4, 9])
def test_inv_flo_8_properties_of_the_coordinates(components: int) -> None:
    coordinates = principal_coordinates(signals(), components)
    assert coordinates.shape == (9, components)
    assert_allclose(coordinates.sum(0), 0, atol=1e-10)
    products = coordinates.T @ coordinates
    assert_allclose(products - np.diag(np.diag(products)), 0, atol=1e-9)
    assert (np.diff(np.diag(products)) <= 1e-12).all()


@pytest.mark.parametrize("shape", [(9, 30), (30, 12), (5, 400)])
def test_inv_flo_8_equals_full_pca_with_the_sign_rule(shape: tuple[int, int]) -> None:
    data = signals(*shape, seed=3)
    reference = PCA(4, svd_solver="full")
    expected = reference.fit_transform(data)
    largest = np.abs(reference.components_).argmax(1)
    expected = expected * np.sign(reference.components_[np.arange(4), largest])
    assert_allclose(principal_coordinates(data, 4), expected, atol=1e-9)


def test_inv_flo_8_blocks_shapes_and_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    data = signals().astype(np.float32)
    whole = principal_coordinates(data.astype(np.float64), 3)
    assert_allclose(principal_coordinates([row.reshape(5, 2, 3) for row in data], 3), whole, atol=1e-12)
    monkeypatch.setattr(simplex, "BLOCK_ELEMENTS", 9 * 7)
    assert_allclose(principal_coordinates(data, 3), whole, atol=1e-12)


def test_inv_flo_8_equal_loadings_take_the_sign_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two classes: the gradients of their rows are opposite, here with rounding in favour of the second."""
    strength = np.array([1.0, -0.5, 2.0, 0.25])
    data = strength[:, None] * np.array([[0.1, -1.0, 0.3, 1.0 + 1e-12, 0.2]])
    expected = -(strength - strength.mean()) * np.linalg.norm(data[0])
    for elements in (1, 2**22):
        monkeypatch.setattr(simplex, "BLOCK_ELEMENTS", elements)
        assert_allclose(principal_coordinates(data, 1)[:, 0], expected, atol=1e-10)


def test_components_without_variance_are_zero() -> None:
    assert_array_equal(principal_coordinates(np.ones((4, 6)), 3), np.zeros((4, 3)))
    data = np.outer([1.0, 2.0, 4.0, 8.0], [1.0, 3.0, -2.0])
    assert_array_equal(principal_coordinates(data, 3)[:, 1:], np.zeros((4, 2)))


def test_coordinates_take_memory_for_one_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.zeros((20, 40_000), dtype=np.float32)
    data[:, 0] = np.arange(20)
    monkeypatch.setattr(simplex, "BLOCK_ELEMENTS", 20 * 500)
    tracemalloc.start()
    principal_coordinates(data, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < data.nbytes / 4


# --- energy and scale -----------------------------------------------------------------------------------------------


def brute_force_energy(points: np.ndarray) -> float:
    n = len(points)
    pairs = ((i, j) for i in range(n) for j in range(i + 1, n))
    return math.fsum(max(float(np.linalg.norm(points[i] - points[j])), 1e-4) ** -2 for i, j in pairs)


@pytest.mark.parametrize(("z", "expected"), [(1.0, 9.871359677736), (0.5, 5.624341412013), (0.1, 3.5)])
def test_g2_energy(z: float, expected: float) -> None:
    assert_allclose(riesz_energy(project_onto_simplex(G2_ROWS, z) / z), expected, atol=1e-9)


def test_g2_chosen_points() -> None:
    _, points = spread_on_simplex(G2_ROWS, scale_candidates("linear"))
    assert_allclose(points, [[1, 0, 0], [0, 1, 0], [1 / 3, 1 / 3, 1 / 3]], atol=1e-9)
    assert_allclose(riesz_energy(points), 3.5, atol=1e-9)
    scale, points = spread_on_simplex(G2_ROWS, scale_candidates("linear"), "beta")
    assert scale == 1.0
    assert_allclose(points, [[0.7, 0, 0.3], [0, 0.65, 0.35], [1 / 3, 1 / 3, 1 / 3]], atol=1e-9)


def test_inv_flo_9_energy_against_brute_force_and_its_symmetries() -> None:
    points = sample_simplex(generator(1), 4, 12)
    points[5] = points[2]
    energy = riesz_energy(points)
    assert_allclose(energy, brute_force_energy(points), rtol=1e-12)
    assert_allclose(riesz_energy(points[generator(2).permutation(12)]), energy, rtol=1e-12)
    assert_allclose(riesz_energy(points[:, [2, 0, 3, 1]]), energy, rtol=1e-12)


def test_inv_flo_9_a_duplicate_adds_the_floor() -> None:
    points = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    more = riesz_energy(np.vstack([points, points[:1]])) - riesz_energy(points)
    assert_allclose(more, 1e8 + 1 / 0.5 + 1 / 2, rtol=1e-14)


@pytest.mark.parametrize("energy_on", ["alpha", "beta"])
@pytest.mark.parametrize("grid", ["linear", "log"])
def test_inv_flo_9_scale_is_the_brute_force_minimizer(energy_on: str, grid: str) -> None:
    kappa = generator(4).normal(size=(6, 3)) * 0.4
    candidates = scale_candidates(grid)[::50]  # type: ignore[arg-type]
    betas = [project_onto_simplex(kappa, z) for z in candidates]
    energies = [
        brute_force_energy(b / z if energy_on == "alpha" else b) for b, z in zip(betas, candidates, strict=True)
    ]
    scale, points = spread_on_simplex(kappa, candidates, energy_on)  # type: ignore[arg-type]
    best = int(np.argmin(energies))
    assert scale == candidates[best]
    assert_allclose(points, betas[best] / scale, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_round_off_does_not_choose_among_equal_energies(seed: int) -> None:
    """Of beta the energy is the same for every scale from which on all projections lie inside the simplex."""
    kappa = generator(seed).normal(size=(6, 3)) * 0.02
    candidates = scale_candidates("linear")
    betas = [project_onto_simplex(kappa, z) for z in candidates]
    inside = [bool((beta > 0).all()) for beta in betas]
    first = inside.index(True)
    assert all(inside[first:])
    energies = np.array([riesz_energy(beta) for beta in betas])
    assert_allclose(energies[first:], energies[first], rtol=1e-9)
    assert energies[:first].min() > energies[first] * (1 + 1e-6)
    assert spread_on_simplex(kappa, candidates, "beta")[0] == candidates[first]


def test_inv_flo_9_energy_of_beta_is_that_of_alpha_over_z_squared() -> None:
    kappa = generator(5).normal(size=(6, 3)) * 0.1
    for z in (0.3, 1.0, 2.5):
        beta = project_onto_simplex(kappa, z)
        assert np.linalg.norm(beta[:, None] - beta[None], axis=2)[np.triu_indices(6, 1)].min() > 1e-4
        assert_allclose(riesz_energy(beta) * z * z, riesz_energy(beta / z), rtol=1e-10)


def test_first_minimizer_wins_and_points_are_exact_members_of_the_simplex() -> None:
    far = np.array([[5.0, 0.0], [0.0, 5.0]])
    assert spread_on_simplex(far, np.array([0.25, 0.5, 1.0]))[0] == 0.25  # vertices at every scale
    _, points = spread_on_simplex(generator(6).normal(size=(40, 7)) * 3, scale_candidates("linear")[::40])
    assert (points >= 0).all()
    assert_allclose(points.sum(1), 1, atol=4e-16)
    assert not ((points > 0) & (points < 1e-12)).any()


def test_scale_candidates() -> None:
    for grid in (scale_candidates("linear"), scale_candidates("log")):
        assert grid.shape == (1000,)
        assert_allclose(grid[[0, -1]], [1e-4, 1], rtol=1e-12)
        assert (np.diff(grid) > 0).all()
    assert_allclose(np.diff(scale_candidates("linear")), (1 - 1e-4) / 999, rtol=1e-9)
    assert_allclose(np.diff(np.log(scale_candidates("log"))), math.log(1e4) / 999, rtol=1e-9)


@pytest.mark.parametrize("d", [3, 12])
def test_scale_search_keeps_one_set_of_distances(d: int) -> None:
    """No array of all differences, (300, 300, d), nor one of all scales."""
    kappa = generator(8).normal(size=(300, d))
    condensed = 300 * 299 / 2 * 8
    tracemalloc.start()
    spread_on_simplex(kappa, scale_candidates("linear")[::20])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * condensed
