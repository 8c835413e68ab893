"""Binary classification by Gaussian processes, given drawn Polya-Gamma variables: sampling them, and predictions.

For labels s_i = +-1 with p(s_i | f_i) = sigmoid(s_i f_i) and f ~ N(0, K), a variable omega_i ~ PG(1, 0) of each sample
makes f Gaussian: with kappa_i = s_i / 2,

    f | omega ~ N(S kappa, S),    S = (K^-1 + diag(omega))^-1,    omega_i | f ~ PG(1, f_i)

Samples without a label have kappa_i = 0 and omega_i = 0. Several processes on the same samples, and several chains of
each, are leading dimensions. No formula here divides by omega.

Sources: Polson, Scott, Windle: Bayesian Inference for Logistic Models Using Polya-Gamma Latent Variables, JASA 2013;
Wenzel, Galy-Fajou, Donner, Kloft, Opper: Efficient Gaussian Process Classification Using Polya-Gamma Data
Augmentation, AAAI 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

JITTER = 1e-3
"""Variance of f that samples do not share."""
TERMS = 16
"""Of the sum that a Polya-Gamma variable is, drawn; the others have their mean, and a standard deviation of 5e-4."""
NORMALS = 2 + 2 * TERMS
"""Normal numbers that a sample takes in a step of a chain."""
PLACES = 20
"""Of the Gauss-Hermite quadrature."""


def kernel(features: Tensor, others: Tensor, scale: float, length: float) -> Tensor:
    """scale exp(-||u_i - v_j||^2 / (2 length^2)) of the directions u and v of features; shape (n, m)."""
    directions, ends = F.normalize(features, dim=-1), F.normalize(others, dim=-1)
    return scale * ((directions @ ends.mT - 1) / length**2).exp()


def polya_gamma(tilt: Tensor, normals: Tensor) -> Tensor:
    """Draws of PG(1, tilt), of the tilt's shape, by its sum of exponential variables.

    Args:
        tilt: any shape.
        normals: standard normal numbers, of that shape and 2 ``TERMS`` more in a last dimension.
    """
    exponential = normals.view(*normals.shape[:-1], TERMS, 2).square().sum(-1) / 2
    places = torch.arange(TERMS, device=tilt.device, dtype=tilt.dtype) + 0.5
    weights = 1 / (2 * (math.pi**2 * places.square() + tilt[..., None].square() / 4))
    small = tilt.abs() < 1e-2
    size = torch.where(small, 1.0, tilt.abs())
    mean = torch.where(small, 0.25 - tilt.square() / 48, (size / 2).tanh() / (2 * size))
    found: Tensor = (weights * exponential).sum(-1) + (mean - weights.sum(-1)).clamp(min=0)
    return found


def conditioned(K: Tensor, kappa: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """What f given omega needs, of shapes (*, n, n) and (*, n).

    With R = diag(omega)^(1/2) these are the Cholesky factor of B = I + R K R, and K^-1 E[f] = kappa - R B^-1 R K kappa.

    Args:
        K: shape (n, n).
        kappa: shape (*, n), 0 without a label.
        omega: shape (*, n), 0 without a label.
    """
    root = omega.sqrt()
    eye = torch.eye(len(K), dtype=K.dtype, device=K.device)
    factor = torch.linalg.cholesky(eye + root[..., :, None] * K * root[..., None, :])
    return factor, kappa - root * _solved(factor, root * (kappa @ K))


def sampled(K: Tensor, kappa: Tensor, chains: int, normals: Sequence[Tensor]) -> Tensor:
    """omega after some steps of a Gibbs sampler, shape (V, chains, n), 0 without a label.

    The first f is drawn from N(0, K); a step draws f given omega, and omega given f.

    Args:
        K: shape (n, n), with ``JITTER`` on its diagonal.
        kappa: shape (V, n).
        chains: of each process.
        normals: standard normal numbers of each draw of omega, at least one, shape (V, chains, n, ``NORMALS``).
    """
    half = kappa[:, None].expand(-1, chains, -1)
    known, factor = half != 0, torch.linalg.cholesky(K)
    omega = torch.zeros_like(half)
    for step, numbers in enumerate(normals):
        f = numbers[..., 0] @ factor.mT
        if step:
            # Matheron's rule: what is drawn from N(0, K), moved by how far its noisy values are from those observed
            cholesky, weights = conditioned(K, half, omega)
            root = omega.sqrt()
            f = f + (weights - root * _solved(cholesky, root * f + numbers[..., 1])) @ K
        omega = torch.where(known, polya_gamma(f, numbers[..., 2:]), 0.0)
    return omega


def posterior(K: Tensor, cross: Tensor, own: Tensor, kappa: Tensor, omega: Tensor) -> tuple[Tensor, Tensor]:
    """Means and variances of f at m places, shape (*, m) each.

    Args:
        K: of the samples with labels and others, shape (n, n), with ``JITTER`` on its diagonal.
        cross: between these and the places, shape (n, m).
        own: variances at the places before any label, shape (m,).
        kappa: shape (*, n).
        omega: shape (*, n).
    """
    factor, weights = conditioned(K, kappa, omega)
    known = torch.linalg.solve_triangular(factor, omega.sqrt()[..., None] * cross, upper=False)
    return weights @ cross, (own - known.square().sum(-2)).clamp(min=JITTER)


def log_probability(mean: Tensor, variance: Tensor, side: Tensor) -> Tensor:
    """log of the mean over chains of E sigmoid(side f), f ~ N(mean, variance); shape (V, m).

    Args:
        mean: shape (V, chains, m).
        variance: of that shape.
        side: +-1, broadcast to shape (V, m).
    """
    places, weights = (torch.from_numpy(one).to(mean) for one in np.polynomial.hermite.hermgauss(PLACES))
    values = mean[..., None] + (2 * variance[..., None]).sqrt() * places
    logs = F.logsigmoid(side[:, None, :, None] * values) + (weights / math.sqrt(math.pi)).log()
    return logs.logsumexp((1, 3)) - math.log(mean.shape[1])


def _solved(factor: Tensor, right: Tensor) -> Tensor:
    """B^-1 right of vectors, shape (*, n), by the Cholesky factor of B."""
    return torch.cholesky_solve(right[..., None], factor)[..., 0]
