"""Summaries of a metric over clients, and the choice of the best."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class ClientSummary:
    """How a metric is distributed over clients.

    Attributes:
        mean: (weighted) mean over clients.
        std: (weighted) population standard deviation over clients.
        worst5: mean of the worst 5 % of the values, rounded up to whole clients (FLOCO, table 3); never weighted.
        jain: Jain's fairness index (sum v)^2 / (K sum v^2) of non-negative values, from 1/K (one client has
            everything) to 1 (all are equal); 1 when all are zero, nan when squares overflow; never weighted.
    """

    mean: float
    std: float
    worst5: float
    jain: float


def first_best(values: Mapping[Key, float], mode: Literal["max", "min"] = "max") -> Key:
    """The key of the best value; of several the first, where :func:`comparable` values are equal.

    Args:
        values: at least one.
        mode: whether the greatest is best, or the least.
    """
    choose = max if mode == "max" else min
    return choose(values, key=lambda key: comparable(values[key]))


def comparable(value: float) -> float:
    """The value to nine significant digits, in which equal means are equal.

    A mean depends in its last bit on the order that its values are added in. Digits behind the point would not do:
    squared errors of small numbers have none.
    """
    return float(f"{value:.8e}")


def summarize(
    values: np.ndarray, weights: np.ndarray | None = None, mode: Literal["max", "min"] = "max"
) -> ClientSummary:
    """Summarizes one metric over clients; a single nan among the values makes the whole summary nan.

    Args:
        values: one value per client, shape (K,), K >= 1.
        weights: non-negative, not all zero, shape (K,); equal weights without.
        mode: whether the least values are the worst, or the greatest.

    Raises:
        ValueError: there are no clients, or the weights do not fit.
    """
    values = np.asarray(values, dtype=np.float64)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or weights.shape != values.shape:
        raise ValueError(f"need one value and weight per client, got shapes {values.shape} and {weights.shape}")
    if (weights < 0).any() or not weights.sum() > 0:
        raise ValueError("weights must be non-negative and not all zero")
    with np.errstate(over="ignore", invalid="ignore"):  # errors of models that diverged
        mean = np.average(values, weights=weights)
        std = np.sqrt(np.average((values - mean) ** 2, weights=weights))
        squares = float((values**2).sum())
    # The ceiling of K / 20 in integers: that of 0.05 * K depends on how 0.05 is rounded.
    lowest = -(-values.size // 20)
    order = np.argsort(values if mode == "max" else -values)
    worst = float("nan") if np.isnan(values).any() else values[order[:lowest]].mean()
    if math.isfinite(values.size * squares):
        jain = float(values.sum()) ** 2 / (values.size * squares) if squares else 1.0
    else:
        jain = float("nan")
    return ClientSummary(mean=float(mean), std=float(std), worst5=float(worst), jain=jain)
