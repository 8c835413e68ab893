"""Counts of samples at thresholds of a score, which can be added, and the areas that they give."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.measures import ratio

_REACH, _BEND = 16, 5
"""How far log-odds are from the middle one at most, and how much closer thresholds are in the middle than there."""


@cache
def levels(thresholds: int, middle: float) -> Tensor:
    """Returns thresholds of a probability from 0 to 1: float64, in order.

    Between these two their log-odds are middle + 16 sinh(5 t) / sinh(5) for evenly spaced t in (-1, 1). Samples
    between the same two thresholds are ties. Models that have hardly learned anything say about the same of all
    samples, and sure ones 0.001 of one and 0.00001 of another: evenly spaced probabilities tell neither apart.

    Args:
        thresholds: T, at least 2.
        middle: the log-odds that a model begins with.
    """
    t = torch.linspace(-1, 1, thresholds, dtype=torch.float64)
    found = (middle + _REACH * torch.sinh(_BEND * t) / math.sinh(_BEND)).sigmoid()
    found[0], found[-1] = 0, 1
    return found


def at_or_above(scores: Tensor, positive: Tensor, levels: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns how many samples have a score of at least each threshold.

    The counts are whole numbers in double precision: their sums are exact, in any order.

    Args:
        scores: in [0, 1], shape (..., n, L), a column for each label.
        positive: whether a sample has the label, bool of the same shape.
        levels: T thresholds in order, of which 0 is the first.
        mask: which samples count, bool of shape (..., n); None: all do.

    Returns:
        float64 of shape (..., 2, L, T): of the samples that have the label, and of all.
    """
    levels, thresholds = levels.to(scores.device, scores.dtype), len(levels)
    *sets, _, labels = scores.shape
    # From 1 to T: a score of 0 reaches the first threshold alone.
    reached = torch.bucketize(scores.contiguous(), levels, right=True)
    firsts = (thresholds + 1) * torch.arange(math.prod(sets) * labels, device=scores.device)
    places = (reached + firsts.view(*sets, 1, labels)).flatten()
    all_that_count = torch.ones_like(positive) if mask is None else mask[..., None].expand_as(positive)
    found = []
    for weights in (positive & all_that_count, all_that_count):
        counts = torch.zeros(len(firsts) * (thresholds + 1), dtype=torch.float64, device=scores.device)
        counts.scatter_add_(0, places, weights.double().flatten())
        found.append(counts.view(*sets, labels, -1).flip(-1).cumsum(-1).flip(-1)[..., 1:])
    return torch.stack(found, -3)


def areas_under_roc(counts: np.ndarray) -> np.ndarray:
    """The mean over labels of the area under the receiver operating characteristic, by the trapezoidal rule.

    The curve ends where no sample is reached: a score of 1, which sure models give to many samples, reaches the last
    threshold. (torchmetrics leaves this end out.) Labels that all samples have, or none, are left out; nan where none
    is left.

    Args:
        counts: of :func:`at_or_above`, shape (..., 2, L, T).

    Returns:
        Shape (...).
    """
    counts = np.concatenate([counts, np.zeros_like(counts[..., :1])], axis=-1)
    hits, reached = counts[..., 0, :, :], counts[..., 1, :, :]
    misses = reached - hits
    true, false = ratio(hits, hits[..., :1], 0), ratio(misses, misses[..., :1], 0)
    areas = -(np.diff(false) * (true[..., 1:] + true[..., :-1]) / 2).sum(-1)
    defined = (hits[..., 0] > 0) & (misses[..., 0] > 0)
    return ratio((areas * defined).sum(-1), defined.sum(-1))


def average_precisions(counts: np.ndarray) -> np.ndarray:
    """The mean over labels of the average precision: the sum of precisions weighted by the gain in recall.

    Labels that no sample has are left out; nan where none is left.

    Args:
        counts: of :func:`at_or_above`, shape (..., 2, L, T).

    Returns:
        Shape (...).
    """
    hits, reached = counts[..., 0, :, :], counts[..., 1, :, :]
    precision, recall = ratio(hits, reached, 0), ratio(hits, hits[..., :1], 0)
    gains = recall - np.concatenate([recall[..., 1:], np.zeros_like(recall[..., :1])], axis=-1)
    defined = hits[..., 0] > 0
    return ratio(((gains * precision).sum(-1) * defined).sum(-1), defined.sum(-1))
