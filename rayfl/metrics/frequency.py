"""Accuracy on frequent and on rare classes apart: classes in three groups by their training samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from rayfl.metrics.measures import Metric

BY_FREQUENCY = "top1_by_frequency"
"""What asks for the three metrics."""

GROUPS = tuple(
    Metric(f"top1_{group}", f"accuracy, {which} classes", "higher", 100, 2, "%")
    for group, which in (("many", "frequent"), ("medium", "medium"), ("few", "rare"))
)
"""Shares of the samples of a group's classes whose class is the most probable one."""

Rule = Literal["share", "count"]

USUAL_BOUNDS: Mapping[Rule, tuple[float, float]] = {"share": (0.75, 0.95), "count": (100, 20)}
"""Of Fed-GraB's and FedLoGe's code; of Liu et al., CVPR 2019."""


def bounds_in_vain(rule: Rule, bounds: tuple[float, float]) -> str:
    """Returns why bounds cannot be those of a rule, in words; empty if they can."""
    first, second = bounds
    if rule == "share" and not 0 < first <= second < 1:
        return "of a share are two numbers between 0 and 1, the first no larger than the second"
    if rule == "count" and not first >= second >= 0:
        return "of a count are two numbers of samples, the second no larger than the first"
    return ""


def frequency_groups(counts: np.ndarray, rule: Rule, bounds: tuple[float, float] | None = None) -> np.ndarray:
    """Divides classes by their training samples.

    ``share``: from the most frequent class on (of equal ones the lower number), a class is frequent if those before it
    have less than 75 % of all samples, medium if they have less than 95 %, else rare (``shot_split`` of the published
    code of Fed-GraB and FedLoGe). ``count``: it is frequent with more than 100 samples, medium with at least 20, else
    rare (Liu, Miao, Zhan, Wang, Gong, Yu: Large-Scale Long-Tailed Recognition in an Open World, CVPR 2019).

    Args:
        counts: training samples of each class, integers of shape (C,).
        rule: the rule.
        bounds: in place of these two numbers.

    Returns:
        By class 0, 1 or 2, int64 of shape (C,): frequent, medium, rare.
    """
    first, second = bounds or USUAL_BOUNDS[rule]
    if rule == "count":
        return np.where(counts > first, 0, np.where(counts >= second, 1, 2))
    order = np.argsort(-counts, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    groups = np.empty(len(counts), dtype=np.int64)
    groups[order] = np.searchsorted(np.array([first, second]) * counts.sum(), before, side="right")
    return groups


def members(groups: np.ndarray) -> np.ndarray:
    """Which classes each group has, bool of shape (C, 3)."""
    found: np.ndarray = groups[:, None] == np.arange(len(GROUPS))
    return found
