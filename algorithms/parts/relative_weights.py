"""Weights of clients that follow from how large their losses are."""

from __future__ import annotations

import numpy as np

LEAST_SHARE = 2.0**-52
"""Least weight of a client, where the largest is 1: it is lost in the rounding of a mean in float64."""


def relative(logs: np.ndarray) -> np.ndarray:
    """Returns e^l in units of the largest of them, so that none leaves the range of numbers; shape (n,), above 0.

    Args:
        logs: l, shape (n,).
    """
    weights: np.ndarray = np.maximum(np.exp(logs - logs.max()), LEAST_SHARE)
    return weights
