"""Group fairness: how far predictions for groups of people are apart, of two classes of which 1 is the good outcome.

Sources: Dwork, Hardt, Pitassi, Reingold, Zemel: Fairness through awareness, ITCS 2012 (statistical parity); Hardt,
Price, Srebro: Equality of opportunity in supervised learning, NeurIPS 2016 (equal opportunity, equalized odds).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.measures import Metric, ratio

FAIRNESS: Mapping[str, Metric] = {
    name: Metric(name, label, "lower")
    for name, label in (
        ("statistical_parity", "statistical parity difference"),
        ("equal_opportunity", "equal opportunity difference"),
        ("equalized_odds", "equalized odds difference"),
        ("average_odds", "average odds difference"),
    )
}
"""By name, the metrics; 0 is fair, and 1 the most unfair."""

CELLS = 4
"""Sums of a group: samples by label (0, 1) and predicted class (0, 1)."""


def cells(group: Tensor, labels: Tensor, predicted: Tensor, groups: int) -> Tensor:
    """Which sum each sample enters, bool of shape (n, groups * ``CELLS``); none without a group or a prediction.

    Args:
        group: positions among the groups, -1 for none, int64 of shape (n,).
        labels: 0 or 1, int64 of shape (n,).
        predicted: 0 or 1, -1 for neither, int64 of shape (n,).
        groups: how many there are.
    """
    place = torch.where((group < 0) | (predicted < 0), -1, CELLS * group + 2 * labels + predicted)
    return place[:, None] == torch.arange(CELLS * groups, device=place.device)


def rates(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each group, the shares of samples for which 1 is predicted: of all, of those with the label 0, and with 1.

    Args:
        counts: samples by group, label and predicted class, shape (..., groups, 2, 2).

    Returns:
        Each of shape (..., groups); nan where a group has no such sample.
    """
    good = counts[..., 1]
    every = ratio(good.sum(-1), counts.sum((-2, -1)))
    return every, *np.moveaxis(ratio(good, counts.sum(-1)), -1, 0)


def differences(counts: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of many sets of samples, in [0, 1].

    Each is the largest difference between two groups: of the rates at which 1 is predicted (statistical parity), of
    these rates among samples with the label 1 (equal opportunity), of these or of those among samples with the label 0,
    whichever is larger (equalized odds), and the mean of both (average odds). A group without samples of a label says
    nothing about it; with fewer than two groups that do the difference is nan, and so is what is made of it.

    Args:
        counts: as for :func:`rates`.

    Returns:
        By name, shape (...).
    """
    every, wrong, right = (_spread(rate) for rate in rates(counts))
    return {
        "statistical_parity": every,
        "equal_opportunity": right,
        "equalized_odds": np.maximum(wrong, right),
        "average_odds": (wrong + right) / 2,
    }


def undefined(name: str) -> str:
    """Returns why a metric may be undefined, in words."""
    of = {"statistical_parity": "", "equal_opportunity": " with the label 1"}.get(name, " with the label 0, or 1")
    return f"they have no samples{of} of two groups"


def _spread(rate: np.ndarray) -> np.ndarray:
    """The largest less the smallest of at least two numbers along the last axis, without nan."""
    known = ~np.isnan(rate)
    most, least = np.where(known, rate, 0).max(-1), np.where(known, rate, 1).min(-1)  # rates are in [0, 1]
    found: np.ndarray = np.where(known.sum(-1) > 1, most - least, np.nan)
    return found
