"""Weights with which clients combine their classifier heads: a quadratic program on the simplex."""

from __future__ import annotations

import numpy as np


def combination_weights(means: np.ndarray, variances: np.ndarray, eigenvalue_clip: float | None = None) -> np.ndarray:
    """Returns how much each of m clients takes of every client's head.

    Row i is the minimiser a over the simplex {a >= 0, sum a = 1} of

        sum_j a_j^2 V_j + || h_i - sum_j a_j h_j ||^2 = a^T P a,    P = diag(V) + D D^T,  D_j = h_i - h_j,

    variance and bias of client i's estimate. P is never formed: :func:`least_on_simplex` works on a factor of it.

    Args:
        means: h, shape (m, ...).
        variances: V >= 0, shape (m,).
        eigenvalue_clip: None, or a value below which eigenvalues of P are set to zero.

    Returns:
        float64 of shape (m, m), rows on the simplex.

    Source: Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and Classifier Collaboration,
    ICLR 2023, eq. 8.
    """
    flat = np.asarray(means, dtype=np.float64).reshape(len(means), -1)
    # rows with the distances of the h_j in at most m dimensions: a rotation changes none
    points = np.asarray(np.linalg.qr(flat.T, mode="r")).T
    deviations = np.diag(np.sqrt(np.asarray(variances, dtype=np.float64)))
    rows = []
    for own in points:
        factor = np.vstack([deviations, (own - points).T])
        rows.append(least_on_simplex(factor if eigenvalue_clip is None else _clipped(factor, eigenvalue_clip)))
    return np.stack(rows)


def least_on_simplex(factor: np.ndarray) -> np.ndarray:
    """The a of the simplex with the least ||M a||, exact up to round-off; one of them if there are several.

    Without the sum, b >= 0 that minimises ||M b||^2 + (sum b - 1)^2 is a multiple of a, since among the b of any one
    sum t the best is t a. That is a problem of non-negative least squares, which an active-set method solves exactly.

    Args:
        factor: M, shape (r, m).
    """
    largest = np.abs(factor).max(initial=0.0)
    scaled = factor / largest if largest > 0 else factor
    system = np.vstack([scaled, np.ones(scaled.shape[1])])
    target = np.append(np.zeros(len(scaled)), 1.0)
    from scipy.optimize import nnls  # a third of a second that only this method pays

    solution, _ = nnls(system, target, maxiter=30 * scaled.shape[1])
    weights: np.ndarray = solution / solution.sum()
    return weights


def pruned(weights: np.ndarray, least: float) -> np.ndarray:
    """Weights below ``least`` set to zero, each row of the others again with sum 1; a row of no others stays."""
    some = weights.max(-1, keepdims=True) >= least
    kept = np.where(some & (weights < least), 0.0, weights)
    scaled: np.ndarray = kept / kept.sum(-1, keepdims=True)
    return scaled


def _clipped(factor: np.ndarray, clip: float) -> np.ndarray:
    """A factor of M^T M without the eigenvalues below ``clip``."""
    _, singular, right = np.linalg.svd(factor, full_matrices=False)
    kept: np.ndarray = (singular[:, None] * right)[singular**2 >= clip]
    return kept
