"""Several labels a sample: F1 scores, mean average precision, and how often all labels are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.metrics.measures import MeasuresBySample, Metric, counted, ratio
from rayfl.metrics.thresholds import at_or_above, average_precisions, levels

_METRICS = (
    Metric("f1_micro", "micro F1", "higher", 100, 2, "%"),
    Metric("f1_macro", "macro F1", "higher", 100, 2, "%"),
    Metric("map", "mAP", "higher", 100, 2, "%"),
    Metric("exact_match", "exact match", "higher", 100, 2, "%"),
    Metric("loss", "loss", "lower", unit="nats"),
)


class MultilabelMeasures(MeasuresBySample):
    """Scores of labels that a sample may have or not, each predicted where its probability is above one half.

    ``f1_micro`` is the F1 score of all labels together, ``f1_macro`` the mean of the labels' own (0 for one that
    neither occurs nor is predicted). ``map`` is the mean over the labels that occur of the average precision, from
    counts at thresholds (:func:`rayfl.metrics.thresholds.levels` around 1/2; as torchmetrics has it with these
    ``thresholds``). ``exact_match`` is the share of
    samples all of whose labels are right.

    Args:
        labels: L.
        thresholds: at how many probabilities ``map`` counts.
        positive_weight: of the loss of labels that a sample has, shape (L,); None: 1.
    """

    metrics = _METRICS

    def __init__(self, labels: int, thresholds: int = 101, positive_weight: tuple[float, ...] | None = None) -> None:
        self.labels, self.thresholds, self._positive_weight = labels, thresholds, positive_weight
        self.size = 3 + 3 * labels + 2 * labels * thresholds

    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """See the base class; logits and targets (0 or 1) of shape (n, L).

        Losses of shape (n,), whether a label is there and whether it is predicted, and probabilities, each of shape
        (n, L).
        """
        weight = self._positive_weight
        weights = None if weight is None else predictions.new_tensor(weight)
        losses = F.binary_cross_entropy_with_logits(
            predictions, targets.to(predictions.dtype), pos_weight=weights, reduction="none"
        )
        return losses.double().mean(-1), targets > 0.5, predictions > 0, predictions.sigmoid()

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class."""
        losses, has, says, scores = found
        right = (has == says).all(-1).double()
        totals = counted(torch.stack([torch.ones_like(losses), losses, right], -1), mask).sum(-2)
        counts = counted(torch.cat([has & says, says, has], -1), mask).sum(-2).double()
        reached = at_or_above(scores, has, levels(self.thresholds, 0.0), mask)
        return torch.cat([totals, counts, reached.flatten(-3)], -1)

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        n, front, ahead = vectors[..., 0], vectors.shape[:-1], 3 + 3 * self.labels
        hits, said, had = np.moveaxis(vectors[..., 3:ahead].reshape(*front, 3, self.labels), -2, 0)
        some = n > 0
        micro = ratio(2 * hits.sum(-1), (said + had).sum(-1), 0)
        macro = ratio(2 * hits, said + had, 0).mean(-1)
        return {
            "f1_micro": np.where(some, micro, np.nan),
            "f1_macro": np.where(some, macro, np.nan),
            "map": average_precisions(vectors[..., ahead:].reshape(*front, 2, self.labels, self.thresholds)),
            "exact_match": ratio(vectors[..., 2], n),
            "loss": ratio(vectors[..., 1], n),
        }

    def undefined(self, name: str) -> str:
        """See the base class."""
        return "no sample has a label" if name == "map" else ""
