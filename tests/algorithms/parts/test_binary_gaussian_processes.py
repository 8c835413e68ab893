"""Gaussian processes given Polya-Gamma variables: their law, the sampler, posteriors, and probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from algorithms.parts import binary_gaussian_processes
from algorithms.parts.binary_gaussian_processes import (
    JITTER,
    NORMALS,
    TERMS,
    conditioned,
    kernel,
    log_probability,
    polya_gamma,
    posterior,
    sampled,
)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(n: int) -> Tensor:
    features = drawn(n, 4)
    return kernel(features, features, 8.0, 0.7) + JITTER * torch.eye(n, dtype=torch.float64)


@pytest.mark.parametrize("tilt", [0.0, 0.5, 3.0, -3.0, 20.0])
def test_polya_gamma_variables_have_their_mean_variance_and_laplace_transform(tilt: float) -> None:
    """E exp(-t omega) = cosh(c/2) / cosh(sqrt((c^2/2 + t)/2)), which gives all moments."""
    count, c = 100_000, abs(tilt)
    found = polya_gamma(torch.full((count,), tilt, dtype=torch.float64), drawn(count, 2 * TERMS))
    mean = 0.25 if not c else math.tanh(c / 2) / (2 * c)
    variance = 1 / 24 if not c else (math.sinh(c) - c) / (4 * c**3 * math.cosh(c / 2) ** 2)
    assert (found > 0).all()
    assert float(found.mean()) == pytest.approx(mean, abs=5 * math.sqrt(variance / count))
    assert float(found.var()) == pytest.approx(variance, rel=0.03)
    for t in (1.0, 10.0):
        expected = math.cosh(c / 2) / math.cosh(math.sqrt((c**2 / 2 + t) / 2))
        assert float((-t * found).exp().mean()) == pytest.approx(expected, rel=0.01)


def test_polya_gamma_variables_are_continuous_in_the_tilt() -> None:
    """The mean of what is not drawn has two forms, one of them near 0."""
    numbers = drawn(2 * TERMS).expand(3, -1)
    found = polya_gamma(torch.tensor([0.0, 0.01 - 1e-12, 0.01 + 1e-12], dtype=torch.float64), numbers)
    assert abs(float(found[1] - found[2])) < 1e-9 and abs(float(found[0] - found[1])) < 1e-5


def test_inv_gauss_1_the_posterior_is_that_of_the_normal_equations() -> None:
    K, kappa, omega = covariance(7), drawn(2, 7).sign() / 2, drawn(2, 7, seed=1).abs() + 0.01
    dense = torch.linalg.inv(torch.linalg.inv(K) + torch.diag_embed(omega))
    expected = (dense @ kappa[..., None])[..., 0]
    _, weights = conditioned(K, kappa, omega)
    assert (weights @ K - expected).abs().max() < 1e-11
    mean, variance = posterior(K, K, K.diagonal(), kappa, omega)
    assert (mean - expected).abs().max() < 1e-11
    assert (variance - dense.diagonal(dim1=-2, dim2=-1).clamp(min=JITTER)).abs().max() < 1e-11


def test_inv_gauss_2_samples_without_a_label_change_nothing() -> None:
    """And those far from all others have what the process has before any."""
    features = torch.cat([drawn(5, 4), -drawn(3, 4, seed=3)])
    K = kernel(features, features, 8.0, 0.5) + JITTER * torch.eye(8, dtype=torch.float64)
    kappa = torch.cat([drawn(1, 5).sign() / 2, torch.zeros(1, 3, dtype=torch.float64)], 1)
    omega = torch.cat([drawn(1, 5, seed=1).abs(), torch.zeros(1, 3, dtype=torch.float64)], 1)
    whole = posterior(K, K[:, 5:], K.diagonal()[5:], kappa, omega)
    alone = posterior(K[:5, :5], K[:5, 5:], K.diagonal()[5:], kappa[:, :5], omega[:, :5])
    for one, other in zip(whole, alone, strict=True):
        assert (one - other).abs().max() < 1e-12


def test_inv_gauss_3_a_step_of_the_sampler_draws_f_from_its_law_given_omega(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two steps the second tilt is f: its moments over many chains, where omega is nearly the same for all."""
    n, chains = 3, 40_000
    K, kappa = covariance(n), torch.tensor([[0.5, -0.5, 0.5]], dtype=torch.float64)
    first, second = drawn(1, chains, n, NORMALS), drawn(1, chains, n, NORMALS, seed=1)
    # the first draw of omega the same in all chains
    first[...] = first[:, :1]
    omega = sampled(K, kappa, chains, [first])[0, 0]
    seen: list[Tensor] = []

    def watched(tilt: Tensor, numbers: Tensor) -> Tensor:
        seen.append(tilt)
        return polya_gamma(tilt, numbers)

    monkeypatch.setattr(binary_gaussian_processes, "polya_gamma", watched)
    sampled(K, kappa, chains, [first, second])
    f = seen[1][0]
    spread = torch.linalg.inv(torch.linalg.inv(K) + torch.diag(omega))
    assert (f.mean(0) - spread @ kappa[0]).abs().max() < 0.05
    assert (torch.cov(f.T) - spread).abs().max() < 0.1


def test_inv_gauss_4_the_sampler_has_the_law_that_importance_sampling_gives() -> None:
    """E omega_i under the posterior of (f, omega) of two samples, by the prior of f weighted by its likelihood."""
    K = torch.tensor([[2.0, 1.2], [1.2, 1.5]], dtype=torch.float64)
    kappa = torch.tensor([[0.5, -0.5]], dtype=torch.float64)
    chains = 20_000
    omega = sampled(K, kappa, chains, [drawn(1, chains, 2, NORMALS, seed=step) for step in range(12)])[0]
    prior = MultivariateNormal(torch.zeros(2, dtype=torch.float64), K)
    torch.manual_seed(0)
    f = prior.sample((400_000,))
    weight = torch.sigmoid(f[:, 0]) * torch.sigmoid(-f[:, 1])
    expected = ((f / 2).tanh() / (2 * f) * weight[:, None]).sum(0) / weight.sum()
    assert (omega.mean(0) - expected).abs().max() < 0.005


def test_probabilities_of_both_sides_are_1_together_and_those_of_an_integral() -> None:
    mean, variance = drawn(2, 3, 4), drawn(2, 3, 4, seed=1).square() + 0.1
    both = [log_probability(mean, variance, torch.full((1, 1), side, dtype=torch.float64)).exp() for side in (1, -1)]
    assert (both[0] + both[1] - 1).abs().max() < 1e-12
    places = np.linspace(-12, 12, 200_001)
    for node in range(2):
        for place in range(4):
            total = 0.0
            for m, v in zip(mean[node, :, place].tolist(), variance[node, :, place].tolist(), strict=True):
                density = np.exp(-(places**2) / 2) / math.sqrt(2 * math.pi)
                total += float(np.trapezoid(density / (1 + np.exp(-(m + math.sqrt(v) * places))), places))
            assert float(both[0][node, place]) == pytest.approx(total / 3, abs=1e-4)


def test_a_kernel_sees_directions_alone() -> None:
    left, right = drawn(4, 3), drawn(5, 3, seed=1)
    found = kernel(left, right, 2.0, 0.6)
    for i in range(4):
        for j in range(5):
            apart = left[i] / left[i].norm() - right[j] / right[j].norm()
            assert float(found[i, j]) == pytest.approx(2 * math.exp(-float(apart @ apart) / (2 * 0.36)), rel=1e-12)
    assert (kernel(3 * left, 0.1 * right, 2.0, 0.6) - found).abs().max() < 1e-12
