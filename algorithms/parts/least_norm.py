"""The shortest mean of several vectors whose weights may not be far from given ones: a quadratic program."""

from __future__ import annotations

import numpy as np

from algorithms.parts.simplex import Array

_AT_BOUND = 1e-7
"""A weight nearer to a bound than this is on it."""


def least_norm_weights(products: Array, around: Array, tolerance: float) -> Array:
    """Returns the weights lambda with the least || sum_k lambda_k g_k ||, one of them if there are several; shape (m,).

    They are not negative, sum to 1, and differ from ``around`` by no more than ``tolerance`` each. Sequential quadratic
    programming (SLSQP) finds which weights are on a bound; the others solve a linear system, up to round-off.

    Args:
        products: inner products of the g_k, shape (m, m).
        around: lambda_0, not negative, of sum 1, shape (m,).
        tolerance: epsilon.
    """
    low, high = np.maximum(around - tolerance, 0), np.minimum(around + tolerance, 1)
    largest = np.abs(products).max(initial=0)
    if tolerance == 0 or largest == 0 or len(around) == 1:
        return around
    from scipy.optimize import minimize  # SciPy loads slowly, and few methods need it

    scaled = products / largest
    found: Array = minimize(
        lambda weights: weights @ scaled @ weights,
        around,
        jac=lambda weights: 2 * scaled @ weights,
        bounds=list(zip(low, high, strict=True)),
        constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    ).x.clip(low, high)
    exact = _on_face(scaled, found, low, high)
    inside = (exact >= low - 1e-12).all() and (exact <= high + 1e-12).all()
    return exact.clip(low, high) if inside else found


def _on_face(products: Array, weights: Array, low: Array, high: Array) -> Array:
    """The minimiser where the weights that are on a bound stay there, whatever bounds the others have.

    Args:
        products: inner products, shape (m, m).
        weights: near the minimiser, shape (m,).
        low: lower bounds.
        high: upper bounds.
    """
    found = np.where(weights < low + _AT_BOUND, low, np.where(weights > high - _AT_BOUND, high, weights))
    free = (weights >= low + _AT_BOUND) & (weights <= high - _AT_BOUND)
    count = int(free.sum())
    if not count:
        return found
    fixed = np.where(free, 0, found)
    system = np.ones((count + 1, count + 1))
    system[:count, :count], system[count, count] = products[np.ix_(free, free)], 0
    target = np.append(-(products @ fixed)[free], 1 - fixed.sum())
    found[free] = np.linalg.lstsq(system, target, rcond=None)[0][:count]
    return found
