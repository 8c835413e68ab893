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
    """The area under the ROC curve of errors by which anomalies are told, the error of normal samples, and the loss.

    The area is the share of pairs of an anomaly and a normal sample in which the anomaly has the greater error; equal
    errors count half (Hanley and McNeil, 1982). Sums over clients are of pairs within clients.

    Args:
        normal: the classes of normal samples; all others are anomalies.
        of_all: whether the loss of an anomaly is its error, too; else it is 0.
    """

    metrics = (
        Metric("auroc", "AUROC", "higher", 100, 2, "%"),
        Metric("error", "Error", "lower", digits=4),
        Metric("loss", "Loss", "lower", digits=4),
    )
    size = 6
    compares = True

    def __init__(self, normal: Sequence[int] = (0,), of_all: bool = False) -> None:
        self._normal, self._of_all = tuple(normal), of_all

    def is_normal(self, y: Tensor) -> Tensor:
        """Returns which samples are normal, bool of the shape of ``y``, their classes."""
        # class by class: a vector of them that is brought from the host would have the host wait in each step
        found = y == self._normal[0]
        for one in self._normal[1:]:
            found = found | (y == one)
        return found

    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """See the base class; errors of shape (n, 1), and classes of shape (n,). One tensor of shape (n, 2)."""
        return (torch.cat([predictions.double(), self.is_normal(targets)[..., None].double()], -1),)

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class; samples, their losses, normal ones, their errors, pairs in the right order, pairs."""
        error, normal = found[0][..., 0], found[0][..., 1] > 0
        present = torch.ones_like(normal) if mask is None else mask > 0
        usual, unusual = normal & present, ~normal & present
        loss, mine = (error.where(kind, 0).sum(-1) for kind in (present if self._of_all else usual, usual))
        count = present.sum(-1).double()
        sums = torch.stack([count, loss, usual.sum(-1).double(), mine, *[torch.zeros_like(count)] * 2], -1)
        width = max(_PAIRS // max(error.numel(), 1), 1)
        for first in range(0, error.shape[-1], width):
            rows = slice(first, first + width)
            own, other = error[..., rows, None], error[..., None, :]
            right = (own > other) + 0.5 * (own == other)
            pairs = unusual[..., rows, None] & usual[..., None, :]
            sums[..., 4:] += torch.stack([(right * pairs).sum((-2, -1)), pairs.sum((-2, -1)).double()], -1)
        return sums

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        n, loss, normal, error, right, pairs = (vectors[..., place] for place in range(self.size))
        return {"auroc": ratio(right, pairs), "error": ratio(error, normal), "loss": ratio(loss, n)}

    def undefined(self, name: str) -> str:
        """See the base class."""
        return {"auroc": "there are no normal samples, or no anomalies", "error": "there are no normal samples"}.get(
            name, ""
        )
