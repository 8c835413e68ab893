"""Classification: cross-entropy, accuracy and calibration; macro F1 and AUROC where they are asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.frequency import BY_FREQUENCY, GROUPS, members
from rayfl.metrics.measures import DIVERGED, MeasuresBySample, Metric, counted, ratio
from rayfl.metrics.people import CELLS, FAIRNESS, cells, differences, undefined
from rayfl.metrics.thresholds import areas_under_roc, at_or_above, levels

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
    """Returns what of the predictions for samples enters their statistics.

    Args:
        log_probabilities: natural logarithms of the class probabilities, shape (n, C).
        labels: int64 of shape (n,).

    Returns:
        The labels' log-probabilities, shape (n,), those of the most probable classes, shape (n,), and which of the five
        most probable classes are right, booleans of shape (n, min(5, C)).
    """
    chosen = log_probabilities.gather(1, labels[:, None])[:, 0]
    top, classes = _most_probable(log_probabilities)
    return chosen, top[:, 0], classes == labels[:, None]


def _most_probable(log_probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the five largest log-probabilities and their classes; ties are ordered alike for all metrics."""
    return log_probabilities.topk(min(5, log_probabilities.shape[1]), dim=1)


def summed(chosen: Tensor, top: Tensor, hits: Tensor, mask: Tensor | None = None) -> Tensor:
    """The statistics of sets of samples, of what :func:`outcomes` found; where probabilities are NaN, nothing is right.

    Args:
        chosen: shape (..., n), as are the others.
        top: the same.
        hits: shape (..., n, min(5, C)).
        mask: which samples count; None for all.

    Returns:
        Vectors as of :func:`batch_statistics`, shape (..., ``STATISTICS_SIZE``).
    """
    hits = (
        hits & ~chosen.isnan()[..., None]
    )  # topk has NaN first, which would be right wherever that class is the label
    confidence, correct = top.double().exp(), hits[..., 0].double()
    rows = torch.stack(
        [-chosen.double(), hits.sum(-1).double(), torch.ones_like(confidence), confidence, correct], dim=-2
    )
    if mask is not None:
        rows, confidence = torch.where(mask[..., None, :], rows, 0), torch.where(mask, confidence, 0)
    loss, among, ones, _, right = rows.sum(-1).unbind(-1)
    bins, inner = _bins(chosen.device)
    # A product with indicators is deterministic on every device; scattered additions are not on CUDA.
    members = (torch.bucketize(confidence, inner)[..., None] == bins).double()
    per_bin = rows[..., 2:, :] @ members
    return torch.cat([torch.stack([ones, loss, right, among], -1), per_bin.flatten(-2)], -1)


@cache
def _bins(device: torch.device) -> tuple[Tensor, Tensor]:
    """The numbers of the bins, and the confidences between them."""
    bins = torch.arange(NUM_BINS, device=device)
    return bins, bins[1:].double() / NUM_BINS


def metric_values(vectors: np.ndarray) -> dict[str, np.ndarray]:
    """The metrics of many sets of samples; nan without samples.

    ``loss`` is the mean cross-entropy in nats, ``top1`` and ``top5`` are shares, ``ece`` is the expected and ``mce``
    the maximum calibration error (Guo et al., 2017, equations 3 and 5).

    Args:
        vectors: the sets' statistics, float64 of shape (..., at least ``STATISTICS_SIZE``).

    Returns:
        By metric, float64 of shape (...).
    """
    metrics = {"loss": _loss, "top1": _top1, "top5": _top5, "ece": _ece, "mce": _mce}
    return {name: metric(vectors) for name, metric in metrics.items()}


# Of vectors of shape (..., at least STATISTICS_SIZE), shape (...).
def _loss(vectors: np.ndarray) -> np.ndarray:
    return _means(vectors, vectors[..., 1])


def _top1(vectors: np.ndarray) -> np.ndarray:
    return _means(vectors, vectors[..., 2])


def _top5(vectors: np.ndarray) -> np.ndarray:
    return _means(vectors, vectors[..., 3])


def _ece(vectors: np.ndarray) -> np.ndarray:
    return _means(vectors, _gaps(vectors).sum(axis=-1))


def _mce(vectors: np.ndarray) -> np.ndarray:
    counts = bins_of(vectors)[..., 0, :]
    filled = counts > 0
    gaps = _gaps(vectors) / np.where(filled, counts, 1)
    worst: np.ndarray = np.where(filled, gaps, -np.inf).max(axis=-1)
    return np.where(filled.any(axis=-1), worst, np.nan)


def _gaps(vectors: np.ndarray) -> np.ndarray:
    """By bin |top-1 hits - sum of confidences|, shape (..., ``NUM_BINS``)."""
    bins = bins_of(vectors)
    gaps: np.ndarray = np.abs(bins[..., 2, :] - bins[..., 1, :])
    return gaps


def bins_of(vectors: np.ndarray) -> np.ndarray:
    """By bin of the confidence, shape (..., 3, ``NUM_BINS``): samples, sum of their confidences, top-1 hits."""
    return vectors[..., _NUM_SCALARS:STATISTICS_SIZE].reshape(*vectors.shape[:-1], 3, NUM_BINS)


def _means(vectors: np.ndarray, totals: np.ndarray) -> np.ndarray:
    counts = vectors[..., 0]
    return np.where(counts > 0, totals / np.where(counts > 0, counts, 1), np.nan)


_METRICS = (
    Metric("top1", "accuracy", "higher", 100, 2, "%"),
    Metric("top5", "top-5 accuracy", "higher", 100, 2, "%"),
    Metric("loss", "loss", "lower", unit="nats"),
    Metric("ece", "ECE", "lower"),
    Metric("mce", "MCE", "lower"),
)
_FURTHER = {
    "f1_macro": (Metric("f1_macro", "macro F1", "higher", 100, 2, "%"),),
    "auroc": (Metric("auroc", "AUROC", "higher", 100, 2, "%"),),
    BY_FREQUENCY: GROUPS,
    **{name: (metric,) for name, metric in FAIRNESS.items()},
}
_BY_PEOPLE = "people"
"""The sums that the metrics of group fairness share."""


class ClassificationMeasures(MeasuresBySample):
    """What :func:`batch_statistics` finds, and further sums for what else is asked for.

    ``f1_macro`` is the mean over the classes that occur, among labels or predictions, of the F1 score. ``auroc`` is the
    mean over the classes with both kinds of samples of the area under the curve of one class against the others, from
    counts at thresholds of the probability (:func:`rayfl.metrics.thresholds.levels` around 1/C; as torchmetrics has it
    with these ``thresholds``, where no probability is 1). ``top1_by_frequency`` is three metrics, the accuracy on
    frequent, medium and rare classes (:func:`rayfl.metrics.frequency.frequency_groups`). Those of
    :mod:`rayfl.metrics.people` compare groups of people, and are undefined for samples that do not say theirs.

    Args:
        further: names among ``f1_macro``, ``auroc``, ``top1_by_frequency``, and those of group fairness.
        classes: C; needed where there is a further metric.
        thresholds: at how many probabilities ``auroc`` counts.
        groups: by class 0, 1 or 2, integers of shape (C,), of ``top1_by_frequency``.
        people: how many groups of people there are.
    """

    def __init__(
        self,
        further: Sequence[str] = (),
        classes: int = 0,
        thresholds: int = 101,
        groups: np.ndarray | None = None,
        people: int = 0,
    ) -> None:
        self.further, self.classes, self.thresholds = tuple(further), classes, thresholds
        # without groups every class is in none; nothing where none are asked for, since this travels with scores
        self._members = members(np.full(classes, -1) if groups is None else groups) if BY_FREQUENCY in further else None
        sizes = {"f1_macro": 3 * classes, "auroc": 2 * classes * thresholds, BY_FREQUENCY: 2 * len(GROUPS)}
        self._sizes = {name: sizes[name] for name in self.further if name in sizes}
        self._people = people
        if any(name in FAIRNESS for name in self.further):
            self._sizes[_BY_PEOPLE] = CELLS * people
        self.size = STATISTICS_SIZE + sum(self._sizes.values())
        self.metrics = (*_METRICS, *(metric for name in self.further for metric in _FURTHER[name]))

    def targets(self, y: Tensor, group: Tensor | None) -> Tensor:
        """See the base class; where groups of people are compared, class and group, int64 of shape (n, 2)."""
        return y if _BY_PEOPLE not in self._sizes or group is None else torch.stack([y, group], 1)

    def classes_of(self, targets: Tensor) -> Tensor:
        """See the base class."""
        return targets if targets.dim() == 1 else targets[:, 0]

    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """See the base class; log-probabilities of shape (n, C) and labels of shape (n,).

        Tensors of :func:`outcomes`; for further metrics, of shape (n, C), which class it is and which is predicted, and
        the probabilities; and of groups of people, those of :func:`rayfl.metrics.people.cells`.

        Args:
            predictions: the log-probabilities.
            targets: the labels, or of shape (n, 2) labels and groups of people (:meth:`targets`).
        """
        labels = self.classes_of(targets)
        group = torch.full_like(targets, -1) if targets.dim() == 1 else targets[:, 1]
        found = outcomes(predictions, labels)
        if not self.further:
            return found
        classes = torch.arange(self.classes, device=labels.device)
        # Not argmax, which takes another one of equal classes than accuracy does.
        predicted = _most_probable(predictions)[1][:, 0].where(~found[0].isnan(), -1)
        own, said = (one[:, None] == classes for one in (labels, predicted))
        # a model may have outputs of no class
        more = *found, own, said, predictions[:, : self.classes].exp()
        return (*more, cells(group, labels, predicted, self._people)) if _BY_PEOPLE in self._sizes else more

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class."""
        chosen, top, hits, *others = found
        parts = [summed(chosen, top, hits, mask)]
        for name in self._sizes:
            own, said, probabilities, *people = others
            if name == "f1_macro":
                parts.append(counted(torch.cat([own & said, said, own], -1), mask).sum(-2).double())
            elif name == BY_FREQUENCY:
                assert self._members is not None
                inside = own.double() @ torch.from_numpy(self._members).to(own.device).double()
                right = inside * (own & said).any(-1, keepdim=True)
                parts.append(counted(torch.cat([inside, right], -1), mask).sum(-2))
            elif name == _BY_PEOPLE:
                parts.append(counted(people[0], mask).sum(-2).double())
            else:
                parts.append(at_or_above(probabilities, own, self._levels(), mask).flatten(-3))
        return torch.cat(parts, -1)

    def _levels(self) -> Tensor:
        return levels(self.thresholds, -math.log(max(self.classes - 1, 1)))

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        found, first = metric_values(vectors), STATISTICS_SIZE
        for name, size in self._sizes.items():
            part = vectors[..., first : first + size]
            first += size
            if name == "f1_macro":
                hits, predicted, labelled = np.moveaxis(part.reshape(*part.shape[:-1], 3, self.classes), -2, 0)
                occurs = predicted + labelled > 0
                scores = ratio(2 * hits, predicted + labelled, 0)
                found[name] = ratio((scores * occurs).sum(-1), occurs.sum(-1))
            elif name == BY_FREQUENCY:
                samples, right = np.moveaxis(part.reshape(*part.shape[:-1], 2, len(GROUPS)), -2, 0)
                shares = np.moveaxis(ratio(right, samples), -1, 0)
                found |= {metric.name: share for metric, share in zip(GROUPS, shares, strict=True)}
            elif name == _BY_PEOPLE:
                apart = differences(part.reshape(*part.shape[:-1], self._people, 2, 2))
                found |= {name: apart[name] for name in self.further if name in FAIRNESS}
            else:
                found[name] = areas_under_roc(part.reshape(*part.shape[:-1], 2, self.classes, self.thresholds))
        return found

    def undefined(self, name: str) -> str:
        """See the base class."""
        if name == "auroc":
            return "no class has both samples of it and of others"
        if any(name == metric.name for metric in GROUPS):
            return "they have no sample of such a class"
        if name in FAIRNESS:
            return undefined(name)
        return DIVERGED


CLASSIFICATION = ClassificationMeasures()
"""Without further metrics."""
