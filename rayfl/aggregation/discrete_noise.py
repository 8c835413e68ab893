"""Integers of normal-like noise: the discrete Gaussian and the Skellam distribution, drawn for whole vectors.

Draws are by rejection with uniform numbers of 53 bits. No logarithm of a probability is a difference of large numbers,
so that the distributions are right to about 11 digits, whatever the deviation. A source without floating-point numbers,
as a deployment needs it, would draw the same distributions much more slowly.

Sources: Canonne, Kamath, Steinke: The Discrete Gaussian for Differential Privacy, NeurIPS 2020, Algorithm 3 (rejection
from discrete Laplace numbers); Hoermann: The transformed rejection method for generating Poisson random variables, 1993
(PTRS). Both are from memory, and tested against the probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

_LARGE = 1000.0
"""From this mean on Poisson numbers are drawn about their mean: NumPy's acceptance loses digits as the mean grows."""
_SMALLEST = 32
"""Poisson numbers below this one have a probability of less than 1e-300 where the mean is large, and never come."""


def discrete_gaussian(generator: np.random.Generator, deviation: float, size: int) -> np.ndarray:
    """Returns integers k with a probability proportional to exp(-k^2 / (2 deviation^2)); int64 of shape (size,).

    The variance is a little below ``deviation``^2, by less than 1e-6 of it from a deviation of 1 on.

    Args:
        generator: draws them, as many numbers as the rejection takes.
        deviation: sigma, positive.
        size: how many.
    """
    scale = math.floor(deviation) + 1

    def proposed(count: int) -> np.ndarray:
        # The difference of two geometric numbers is a discrete Laplace number: P(k) ~ exp(-|k| / scale).
        first, second = np.floor(generator.standard_exponential((2, count)) * scale)
        found: np.ndarray = first - second
        off = np.abs(found) - deviation * deviation / scale
        accepted: np.ndarray = found[generator.random(count) < np.exp(-off * off / (2 * deviation * deviation))]
        return accepted

    return _filled(proposed, size)


def skellam(generator: np.random.Generator, variance: float, size: int) -> np.ndarray:
    """Returns differences of two Poisson numbers of the mean ``variance`` / 2 each; int64 of shape (size,).

    Sums of such numbers are Skellam numbers again, and their variances add up.

    Args:
        generator: draws them.
        variance: mu, positive.
        size: how many.
    """
    first = _poisson_about(generator, variance / 2, size)
    found: np.ndarray = first - _poisson_about(generator, variance / 2, size)
    return found


def _poisson_about(generator: np.random.Generator, mean: float, size: int) -> np.ndarray:
    """Returns Poisson numbers minus the whole part of their mean, int64 of shape (size,)."""
    whole = math.floor(mean)
    if mean < _LARGE:
        few: np.ndarray = generator.poisson(mean, size) - whole
        return few
    rest = mean - whole
    spread = 0.931 + 2.53 * math.sqrt(mean)
    shape = 0.02483 * spread - 0.059
    factor = 1.1239 + 1.1328 / (spread - 3.4)

    def proposed(count: int) -> np.ndarray:
        centred, height = generator.random(count) - 0.5, generator.random(count)
        tail = 0.5 - np.abs(centred)
        with np.errstate(divide="ignore"):
            found = np.floor((2 * shape / tail + spread) * centred + rest + 0.43)
            left = np.log(height * factor / (shape / (tail * tail) + spread))
        possible = found > _SMALLEST - whole
        return found[possible][left[possible] <= _log_probability(found[possible] - rest, mean)]

    return _filled(proposed, size) if size else np.zeros(0, dtype=np.int64)


def _log_probability(above: np.ndarray, mean: float) -> np.ndarray:
    """Returns the logarithm of the probability of Poisson numbers, by how much they are above their mean.

    It is -mean f(above / mean) - log(2 pi k) / 2 - Stirling's rest, f(e) = (1 + e) log(1 + e) - e, after Loader (2000).
    """
    share, number = above / mean, mean + above
    rest = (1 / 12 - (1 / 360 - 1 / (1260 * number * number)) / (number * number)) / number
    return -mean * ((1 + share) * np.log1p(share) - share) - 0.5 * np.log(2 * math.pi * number) - rest


def _filled(proposed: Callable[[int], np.ndarray], size: int) -> np.ndarray:
    """Returns the first accepted numbers of proposals, int64 of shape (size,)."""
    parts, missing = [], size
    while missing:
        found = proposed(missing + missing // 3 + 16)[:missing]
        parts.append(found)
        missing -= len(found)
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)
