"""Metrics as sums that can be added across batches and clients, and their summary over clients.

A pooled metric is that of the sum of the clients' statistics; the calibration error of a union of clients is not
the mean of theirs, so both are worth recording.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)

NUM_BINS = 15
"""Calibration bins (lower, upper] of equal width on (0, 1] (Guo et al., 2017)."""

_NUM_SCALARS = 4
STATISTICS_SIZE = _NUM_SCALARS + 3 * NUM_BINS
"""Length of the vector of statistics."""


def batch_statistics(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """The sufficient statistics of a batch, computed on its device without waiting for it.

    Ties between classes are broken by the order of ``torch.topk``. With fewer than five classes every label is
    among the top five.

    Args:
        log_probabilities: natural logarithms of the class probabilities, shape (n, C), n >= 0.
        labels: int64 of shape (n,), values in 0..C-1.

    Returns:
        A float64 vector of length ``STATISTICS_SIZE`` that can be added over batches: n, sum of the cross-entropy in
        nats, top-1 hits, top-5 hits, then for each bin of the confidence (the largest probability) the number of
        samples, the sum of their confidences and the number of top-1 hits.
    """
    return summed(*outcomes(log_probabilities, labels))


def outcomes(log_probabilities: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What of the predictions for samples enters their statistics.

    Args:
        log_probabilities: natural logarithms of the class probabilities, shape (n, C).
        labels: int64 of shape (n,).

    Returns:
        The labels' log-probabilities, shape (n,), those of the most probable classes, shape (n,), and which of the five
        most probable classes are right, booleans of shape (n, min(5, C)).
    """
    chosen = log_probabilities.gather(1, labels[:, None])[:, 0]
    top, classes = log_probabilities.topk(min(5, log_probabilities.shape[1]), dim=1)
    return chosen, top[:, 0], classes == labels[:, None]


def summed(chosen: Tensor, top: Tensor, hits: Tensor, mask: Tensor | None = None) -> Tensor:
    """The statistics of sets of samples, of what :func:`outcomes` found.

    Args:
        chosen: shape (..., n), as are the others.
        top: the same.
        hits: shape (..., n, min(5, C)).
        mask: which samples count; None for all.

    Returns:
        Vectors as of :func:`batch_statistics`, shape (..., ``STATISTICS_SIZE``).
    """
    chosen, confidence, correct = chosen.double(), top.double().exp(), hits[..., 0].double()
    ones, among = torch.ones_like(confidence), hits.sum(-1)
    if mask is not None:
        chosen, confidence, correct, ones, among = (
            torch.where(mask, values, 0) for values in (chosen, confidence, correct, ones, among)
        )
    totals = torch.stack([ones.sum(-1), -chosen.sum(-1), correct.sum(-1), among.sum(-1).double()], -1)
    bins = torch.arange(NUM_BINS, device=chosen.device)
    inner = bins[1:].double() / NUM_BINS
    # A product with indicators is deterministic on every device; scattered additions are not on CUDA.
    members = (torch.bucketize(confidence, inner)[..., None] == bins).double()
    per_bin = torch.stack([ones, confidence, correct], -2) @ members
    return torch.cat([totals, per_bin.flatten(-2)], -1)


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sufficient statistics of any set of samples; add two to get those of their union.

    Attributes:
        vector: float64 of shape (``STATISTICS_SIZE``,), laid out as by :func:`batch_statistics`.
    """

    vector: np.ndarray

    @classmethod
    def from_vector(cls, vector: Tensor | np.ndarray) -> Statistics:
        """Wraps a copy of a vector from any device; raises ValueError unless its shape is (``STATISTICS_SIZE``,)."""
        values = vector.detach().cpu().numpy() if isinstance(vector, Tensor) else vector
        if values.shape != (STATISTICS_SIZE,):
            raise ValueError(f"statistics are a vector of length {STATISTICS_SIZE}, not of shape {values.shape}")
        return cls(np.array(values, dtype=np.float64))

    @classmethod
    def empty(cls) -> Statistics:
        """The statistics of no samples: the start value of a sum over clients."""
        return cls(np.zeros(STATISTICS_SIZE))

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(self.vector + other.vector)

    @property
    def n(self) -> int:
        """Number of samples."""
        return int(self.vector[0])

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats; nan without samples."""
        return float(_loss(self.vector))

    @property
    def top1(self) -> float:
        """Share of samples whose label is the most probable class; nan without samples."""
        return float(_top1(self.vector))

    @property
    def top5(self) -> float:
        """Share of samples whose label is among the five most probable classes; nan without samples."""
        return float(_top5(self.vector))

    @property
    def ece(self) -> float:
        """Expected calibration error in [0, 1] (Guo et al., 2017, equation 3); nan without samples."""
        return float(_ece(self.vector))

    @property
    def mce(self) -> float:
        """Maximum calibration error over non-empty bins, in [0, 1] (Guo et al., 2017, eq. 5); nan without samples."""
        return float(_mce(self.vector))

    def bins(self) -> np.ndarray:
        """By bin of the confidence, shape (3, ``NUM_BINS``): samples, sum of their confidences, top-1 hits."""
        return _bins(self.vector)


def metric_values(vectors: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of many sets of samples, as the properties of :class:`Statistics` have them one by one.

    Args:
        vectors: the sets' statistics, float64 of shape (K, ``STATISTICS_SIZE``).

    Returns:
        By metric, float64 of shape (K,).
    """
    metrics = {"loss": _loss, "top1": _top1, "top5": _top5, "ece": _ece, "mce": _mce}
    return {name: metric(vectors) for name, metric in metrics.items()}


# Of vectors of shape (..., STATISTICS_SIZE), shape (...).


def _loss(vectors: np.ndarray) -> np.ndarray:
    return _means(vectors, vectors[..., 1])


def _top1(vectors: np.ndarray) -> np.ndarray:
    return _means(vectors, vectors[..., 2])


def _top5(vectors: np.ndarray) -> np.ndarray:
    return _means(vectors, vectors[..., 3])


def _ece(vectors: np.ndarray) -> np.ndarray:
    return _means(vectors, _gaps(vectors).sum(axis=-1))


def _mce(vectors: np.ndarray) -> np.ndarray:
    counts = _bins(vectors)[..., 0, :]
    filled = counts > 0
    gaps = _gaps(vectors) / np.where(filled, counts, 1)
    worst: np.ndarray = np.where(filled, gaps, -np.inf).max(axis=-1)
    return np.where(filled.any(axis=-1), worst, np.nan)


def _gaps(vectors: np.ndarray) -> np.ndarray:
    """By bin |top-1 hits - sum of confidences|, shape (..., ``NUM_BINS``)."""
    bins = _bins(vectors)
    gaps: np.ndarray = np.abs(bins[..., 2, :] - bins[..., 1, :])
    return gaps


def _bins(vectors: np.ndarray) -> np.ndarray:
    return vectors[..., _NUM_SCALARS:].reshape(*vectors.shape[:-1], 3, NUM_BINS)


def _means(vectors: np.ndarray, totals: np.ndarray) -> np.ndarray:
    counts = vectors[..., 0]
    return np.where(counts > 0, totals / np.where(counts > 0, counts, 1), np.nan)


@dataclass(frozen=True)
class ClientSummary:
    """How a metric is distributed over clients.

    Attributes:
        mean: (weighted) mean over clients.
        std: (weighted) population standard deviation over clients.
        worst5: mean of the lowest 5 % of the values, rounded up to whole clients (FLOCO, table 3); never weighted.
        jain: Jain's fairness index (sum v)^2 / (K sum v^2) of non-negative values, from 1/K (one client has
            everything) to 1 (all are equal); 1 when all are zero; never weighted.
    """

    mean: float
    std: float
    worst5: float
    jain: float


def first_best(values: Mapping[Key, float], mode: Literal["max", "min"] = "max") -> Key:
    """The key of the best value; of several the first.

    A mean of equal values depends in its last bit on the order they are added in: what is equal after rounding to 1e-9
    is equal.

    Args:
        values: at least one.
        mode: whether the greatest is best, or the least.
    """
    choose = max if mode == "max" else min
    return choose(values, key=lambda key: round(values[key], 9))


def summarize(values: np.ndarray, weights: np.ndarray | None = None) -> ClientSummary:
    """Summarizes one metric over clients; a single nan among the values makes the whole summary nan.

    Args:
        values: one value per client, shape (K,), K >= 1.
        weights: non-negative, not all zero, shape (K,); equal weights without.

    Raises:
        ValueError: there are no clients, or the weights do not fit.
    """
    values = np.asarray(values, dtype=np.float64)
    weights = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64)
    if values.ndim != 1 or values.size == 0 or weights.shape != values.shape:
        raise ValueError(f"need one value and weight per client, got shapes {values.shape} and {weights.shape}")
    if (weights < 0).any() or not weights.sum() > 0:
        raise ValueError("weights must be non-negative and not all zero")
    mean = np.average(values, weights=weights)
    std = np.sqrt(np.average((values - mean) ** 2, weights=weights))
    # The ceiling of K / 20 in integers: that of 0.05 * K depends on how 0.05 is rounded.
    lowest = -(-values.size // 20)
    worst = float("nan") if np.isnan(values).any() else values[np.argsort(values)[:lowest]].mean()
    squares = float((values**2).sum())
    jain = float(values.sum()) ** 2 / (values.size * squares) if squares else 1.0
    return ClientSummary(mean=float(mean), std=float(std), worst5=float(worst), jain=jain)
