"""Uniform points of the simplex and of its intersection with an L1 ball."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import chisquare, ks_2samp, kstest

from algorithms.parts import simplex_sampling
from algorithms.parts.simplex_sampling import pattern_probabilities, sample_ball, sample_ball_legacy, sample_simplex

LEVEL = 1e-3  # of every statistical test; seeds are fixed, so a test passes always or never


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def distances(points: np.ndarray, center: np.ndarray) -> np.ndarray:
    return np.abs(points - center).sum(1)


def rejected_from_simplex(center: np.ndarray, radius: float, count: int, seed: int) -> np.ndarray:
    """Plain rejection: uniform points of the simplex that happen to lie in the ball."""
    points = sample_simplex(generator(seed), len(center), count)
    return points[distances(points, center) <= radius]


def assert_same_moments(left: np.ndarray, right: np.ndarray, deviations: float = 5) -> None:
    """Means and variances of two independent samples agree up to Monte-Carlo error."""
    for a, b in ((left, right), ((left - left.mean(0)) ** 2, (right - right.mean(0)) ** 2)):
        error = np.sqrt(a.var(0) / len(a) + b.var(0) / len(b))
        assert (np.abs(a.mean(0) - b.mean(0)) <= deviations * error + 1e-12).all()


def assert_same_law(left: np.ndarray, right: np.ndarray, center: np.ndarray) -> None:
    """Two-sample Kolmogorov-Smirnov tests of every coordinate, of a mixture of them and of the distance."""
    mix = np.cos(np.arange(len(center)))
    samples = ([*points.T, points @ mix, distances(points, center)] for points in (left, right))
    for a, b in zip(*samples, strict=True):
        assert ks_2samp(a, b).pvalue > LEVEL


@pytest.mark.parametrize("d", [2, 4, 7])
def test_inv_flo_5_uniform_on_the_simplex(d: int) -> None:
    points = sample_simplex(generator(d), d, 20_000)
    assert (points >= 0).all()
    assert_allclose(points.sum(1), 1, atol=1e-12)
    variance = (d - 1) / (d**2 * (d + 1))
    assert_allclose(points.mean(0), 1 / d, atol=5 * math.sqrt(variance / len(points)))
    assert_allclose(points.var(0), variance, rtol=0.06)
    for column in points.T:
        assert kstest(column, lambda t: 1 - (1 - t) ** (d - 1)).pvalue > LEVEL


def test_one_vertex_has_one_point() -> None:
    assert_array_equal(sample_simplex(generator(), 1, 3), np.ones((3, 1)))
    for radius in (0.0, 0.3, 2.0):
        assert_array_equal(sample_ball(generator(), np.ones(1), radius, 3), np.ones((3, 1)))


def test_no_points_asked_for() -> None:
    for radius in (0.0, 0.3, 2.0):
        assert sample_ball(generator(), np.full(3, 1 / 3), radius, 0).shape == (0, 3)


def test_the_test_of_laws_sees_a_sampler_that_is_not_uniform() -> None:
    """Distances uniform in [0, rho] instead of their law t^(d - 1); and a centre that is slightly off."""
    c, radius = np.array([0.4, 0.3, 0.3]), 0.6
    rejected = rejected_from_simplex(c, radius, 100_000, seed=41)
    uniform = sample_ball(generator(42), c, radius, 20_000)
    assert_same_law(uniform, rejected, c)
    shrunk = c + (uniform - c) * np.sqrt(distances(uniform, c) / radius)[:, None]
    shifted = sample_ball(generator(42), np.array([0.42, 0.28, 0.3]), radius, 20_000)
    for other in (shrunk, shifted):
        with pytest.raises(AssertionError):
            assert_same_law(other, rejected, c)


@pytest.mark.parametrize("d", [2, 3, 4, 7])
def test_inv_flo_10_ball_around_an_inner_point(d: int) -> None:
    radius = 1.0 / d  # every coordinate of the barycentre is at least rho / 2
    center, n = np.full(d, 1 / d), 20_000
    differences = sample_ball(generator(10 + d), center, radius, n) - center
    lengths = np.abs(differences).sum(1)
    assert_allclose(differences.sum(1), 0, atol=1e-12)
    assert (lengths <= radius + 1e-12).all()
    assert kstest(lengths / radius, lambda t: t ** (d - 1)).pvalue > LEVEL
    assert_allclose(lengths.mean(), radius * (d - 1) / d, rtol=0.01)
    variance = radius**2 * (d - 1) * (2 * d - 1) / (d**2 * (d + 1) ** 2)
    covariance = -(radius**2) * (2 * d - 1) / (d**2 * (d + 1) ** 2)
    assert_allclose(differences.mean(0), 0, atol=5 * math.sqrt(variance / n))
    expected = np.where(np.eye(d, dtype=bool), variance, covariance)
    assert_allclose(np.cov(differences.T), expected, atol=0.06 * variance)


def test_inv_flo_10_acceptance_is_one_where_the_ball_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rejection would have the walk take over, and give other points."""
    balls = [(np.array([0.6, 0.4, 0.0, 0.0]), 0.6, 5000), (np.full(7, 1 / 7), 0.2, 300), (np.eye(20)[3], 0.8, 100)]

    def drawn() -> list[np.ndarray]:
        return [sample_ball(generator(seed), *ball) for seed, ball in enumerate(balls, 1)]

    usual = drawn()
    monkeypatch.setattr(simplex_sampling, "MAX_REJECTIONS", 1)
    for points, expected in zip(drawn(), usual, strict=True):
        assert np.array_equal(points, expected)


@pytest.mark.parametrize(("d", "radius"), [(2, 0.5), (4, 0.8), (7, 0.1), (20, 1.9)])
def test_inv_flo_11_at_a_vertex(d: int, radius: float) -> None:
    center, n = np.eye(d)[1], 10_000
    points = sample_ball(generator(20 + d), center, radius, n)
    assert (points >= 0).all()
    assert_allclose(points.sum(1), 1, atol=1e-12)
    mass = 1 - points[:, 1]
    assert kstest(mass / (radius / 2), lambda t: np.clip(t, 0, 1) ** (d - 1)).pvalue > LEVEL
    assert_allclose(points[:, 1].mean(), 1 - radius / 2 * (d - 1) / d, atol=0.01 * radius)
    shares = np.delete(points, 1, axis=1) / mass[:, None]
    if d > 2:
        assert kstest(shares[:, 0], lambda t: 1 - (1 - t) ** (d - 2)).pvalue > LEVEL
        assert abs(np.corrcoef(shares[:, 0], mass)[0, 1]) < 0.04


def test_inv_flo_11_radial_law_on_a_face() -> None:
    center, radius = np.array([0.5, 0.0, 0.3, 0.0, 0.2]), 0.4
    points = sample_ball(generator(31), center, radius, 10_000)
    assert (points >= 0).all()
    assert kstest(distances(points, center) / radius, lambda t: np.clip(t, 0, 1) ** 4).pvalue > LEVEL


@pytest.mark.parametrize(
    ("center", "radius"),
    [
        ([0.7, 0.25, 0.05, 0.0], 0.9),
        ([0.05, 0.05, 0.9], 0.6),
        ([0.4, 0.3, 0.3], 1.9),
        ([0.02, 0.48, 0.5, 0.0, 0.0], 1.1),
    ],
)
def test_inv_flo_12_general_centre(center: list[float], radius: float) -> None:
    c = np.array(center)
    points = sample_ball(generator(40), c, radius, 20_000)
    assert (points >= 0).all()
    assert_allclose(points.sum(1), 1, atol=1e-12)
    assert (distances(points, c) <= radius + 1e-12).all()
    rejected = rejected_from_simplex(c, radius, 100_000, seed=41)
    assert len(rejected) > 5000
    assert_same_moments(points, rejected)
    assert_same_law(points, rejected, c)


@pytest.mark.slow
def test_inv_flo_12_hit_and_run_when_proposals_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplex_sampling, "MAX_REJECTIONS", 0)
    for seed, (c, radius) in enumerate([(np.array([0.7, 0.25, 0.05, 0.0]), 0.9), (np.full(4, 0.25), 0.7)]):
        points = sample_ball(generator(50 + seed), c, radius, 3000)
        assert points.shape == (3000, 4)
        assert (points >= 0).all()
        assert_allclose(points.sum(1), 1, atol=1e-12)
        assert (distances(points, c) <= radius + 1e-9).all()
        rejected = rejected_from_simplex(c, radius, 60_000, seed=51)
        assert_same_moments(points, rejected)
        assert_same_law(points, rejected, c)


@pytest.mark.slow
def test_inv_flo_12_centre_close_to_many_faces_still_gives_points() -> None:
    center = np.full(12, 1e-9)
    center[0] = 1 - center[1:].sum()
    points = sample_ball(generator(60), center, 0.2, 400)
    vertex = sample_ball(generator(61), np.eye(12)[0], 0.2, 4000)
    assert points.shape == (400, 12)
    assert (points >= 0).all()
    assert (distances(points, center) <= 0.2 + 1e-9).all()
    assert_same_moments(points, vertex)


@pytest.mark.parametrize("d", [2, 3, 4, 7])
def test_inv_flo_13_law_of_the_sign_patterns(d: int) -> None:
    law = pattern_probabilities(d)
    expected = [math.comb(d, p) * math.comb(d - 2, p - 1) / math.comb(2 * d - 2, d - 1) for p in range(1, d)]
    assert_allclose(law, [0, *expected, 0], atol=1e-15)
    center = np.full(d, 1 / d)
    points = sample_ball(generator(70 + d), center, 0.1 / d, 10_000)
    counts = np.bincount((points > center).sum(1), minlength=d + 1)
    assert counts.sum() == counts[1:d].sum()
    if d > 2:
        assert chisquare(counts[1:d], np.array(expected) * counts.sum()).pvalue > LEVEL


def test_inv_flo_13_patterns_around_a_centre_with_zeros() -> None:
    center, radius = np.array([0.0, 0.35, 0.3, 0.0, 0.35]), 0.4
    points = sample_ball(generator(80), center, radius, 10_000)
    # p in {2, 3, 4} with weights C(3, p - 2) / ((p - 1)! (4 - p)!)
    law = np.array([1 / 2, 3 / 2, 3 / 6])
    assert_allclose(pattern_probabilities(5, zeros=2)[2:5], law / law.sum(), atol=1e-15)
    counts = np.bincount((points > center).sum(1), minlength=6)[2:5]
    assert counts.sum() == 10_000
    assert chisquare(counts, law / law.sum() * 10_000).pvalue > LEVEL


def test_g11_law_of_the_sign_patterns() -> None:
    assert_allclose(pattern_probabilities(3)[1:3], [0.5, 0.5], atol=1e-15)
    assert_allclose(pattern_probabilities(4)[1:4], [0.2, 0.6, 0.2], atol=1e-15)
    assert_allclose(pattern_probabilities(7)[1:7], np.array([1, 15, 50, 50, 15, 1]) / 132, atol=1e-15)


@pytest.mark.parametrize(
    ("center", "radius", "mean", "variance", "length"),
    [
        ([0.6, 0.4, 0, 0], 0.6, [0.506, 0.306, 0.094, 0.094], [0.0160, 0.0160, 0.0047, 0.0047], 0.450),
        ([0.7, 0.25, 0.05, 0], 0.5, [0.632, 0.182, 0.098, 0.087], [0.0119, 0.0118, 0.0046, 0.0040], 0.364),
        ([1, 0, 0, 0], 0.8, [0.7, 0.1, 0.1, 0.1], [0.006] * 4, 0.6),
    ],
)
def test_g21_moments_of_the_ball(
    center: list[float], radius: float, mean: list[float], variance: list[float], length: float
) -> None:
    c = np.array(center, dtype=np.float64)
    points = sample_ball(generator(90), c, radius, 100_000)
    assert_allclose(points.mean(0), mean, atol=2e-3)
    assert_allclose(points.var(0), variance, atol=2.5e-4)
    assert_allclose(distances(points, c).mean(), length, atol=1.5e-3)


def test_g21_acceptance() -> None:
    law = pattern_probabilities(4, zeros=1)
    c = np.array([0.7, 0.25, 0.05, 0.0])
    accepted = (c + simplex_sampling.propose(generator(91), c, 0.5, law, 50_000) >= 0).all(1).mean()
    assert_allclose(accepted, 0.57, atol=0.01)


@pytest.mark.parametrize("radius", [2.0, 2.5])
def test_inv_flo_14_a_ball_of_radius_two_is_the_simplex_draw_for_draw(radius: float) -> None:
    center = np.array([0.5, 0.3, 0.0, 0.2])
    assert_array_equal(sample_ball(generator(3), center, radius, 50), sample_simplex(generator(3), 4, 50))


def test_inv_flo_15_radius_zero_is_the_centre() -> None:
    center = np.array([0.5, 0.3, 0.0, 0.2])
    assert_array_equal(sample_ball(generator(3), center, 0.0, 4), np.stack([center] * 4))


def test_legacy_sampler_has_the_defects_it_is_kept_for() -> None:
    vertex, barycenter = np.eye(7)[0], np.full(7, 1 / 7)
    points = sample_ball_legacy(generator(5), barycenter, 0.1, 20_000)
    lengths = distances(points, barycenter)
    assert kstest(lengths / 0.1, lambda t: np.clip(t, 0, 1)).pvalue > LEVEL  # not t^6
    assert 0.02 < points.sum(1).std() < 0.03
    assert (sample_ball_legacy(generator(6), vertex, 0.1, 2000) < 0).any(1).mean() > 0.95
