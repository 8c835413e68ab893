"""Anomaly detection: how well reconstruction errors tell anomalies from normal samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.measures import MeasuresBySample, Metric, ratio

_PAIRS = 1 << 22
"""Pairs that are compared at a time: what is computed of them is then of 100 MiB."""


class AnomalyMeasures(MeasuresBySample):
    """The area under the ROC curve of a score by which anomalies are to be told, and the mean score of normal samples.

    The area is the share of pairs of an anomaly and a normal sample in which the anomaly has the higher score; equal
    scores count half (Hanley and McNeil, 1982). Sums over clients are of pairs within clients.

    Args:
        normal: the classes of normal samples; all others are anomalies.
    """

    metrics = (Metric("auroc", "AUROC", "higher", 100, 2, "%"), Metric("loss", "Error", "lower", digits=4))
    size = 5
    compares = True

    def __init__(self, normal: Sequence[int] = (0,)) -> None:
        self._normal = tuple(normal)

    def is_normal(self, y: Tensor) -> Tensor:
        """Returns which samples are normal, bool of the shape of ``y``, their classes."""
        # class by class: a vector of them that is brought from the host would have the host wait in each step
        found = y == self._normal[0]
        for one in self._normal[1:]:
            found = found | (y == one)
        return found

    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """See the base class; scores of shape (n, 1), and classes of shape (n,). One tensor of shape (n, 2)."""
        return (torch.cat([predictions.double(), self.is_normal(targets)[..., None].double()], -1),)

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class; samples, normal ones, the sum of their scores, pairs in the right order, pairs."""
        score, normal = found[0][..., 0], found[0][..., 1] > 0
        present = torch.ones_like(normal) if mask is None else mask > 0
        usual, unusual = normal & present, ~normal & present
        counts = [kind.sum(-1).double() for kind in (present, usual)]
        sums = torch.stack([*counts, score.where(usual, 0).sum(-1), *[torch.zeros_like(counts[0])] * 2], -1)
        width = max(_PAIRS // max(score.numel(), 1), 1)
        for first in range(0, score.shape[-1], width):
            rows = slice(first, first + width)
            own, other = score[..., rows, None], score[..., None, :]
            right = (own > other) + 0.5 * (own == other)
            pairs = unusual[..., rows, None] & usual[..., None, :]
            sums[..., 3:] += torch.stack([(right * pairs).sum((-2, -1)), pairs.sum((-2, -1)).double()], -1)
        return sums

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        return {"auroc": ratio(vectors[..., 3], vectors[..., 4]), "loss": ratio(vectors[..., 2], vectors[..., 1])}

    def undefined(self, name: str) -> str:
        """See the base class."""
        return "there are no normal samples" + (", or no anomalies" if name == "auroc" else "")
