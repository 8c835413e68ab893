"""The rank of a chosen item among others: hit rate, discounted cumulative gain, and losses to learn it by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.metrics.measures import MeasuresBySample, Metric, counted, ratio

Pairing = Literal["bce", "bpr"]


@dataclass(frozen=True)
class RankingLoss:
    """The loss of a row of scores, of which the first is the chosen item's.

    Attributes:
        kind: ``bce``: the mean over all items of the binary cross-entropy of sigmoid(s), 1 for the chosen item and 0
            for the others (He et al., Neural Collaborative Filtering, WWW 2017, equation 7). ``bpr``: the mean over
            the others j of -log sigmoid(s_0 - s_j) (Rendle et al., BPR, UAI 2009, section 4.1, without its
            regularization, which is ``train.weight_decay``).
    """

    kind: Pairing = "bce"

    def __call__(self, scores: Tensor) -> Tensor:
        """Returns the loss of each row of ``scores``, shape (..., 1 + n); it works under ``vmap``."""
        if self.kind == "bpr":
            return -F.logsigmoid(scores[..., :1] - scores[..., 1:]).mean(-1)
        return (F.softplus(scores[..., 1:]).sum(-1) + F.softplus(-scores[..., 0])) / scores.shape[-1]


class RankingMeasures(MeasuresBySample):
    """Where the chosen item stands among all items of its row, if these are sorted by their scores.

    The rank r of the chosen item is 1 plus the number of others whose score is not lower: an equal score counts
    against it, so that a model which gives all items one score is the worst. ``hit_rate`` is the share of samples with
    r <= k (HR@k). ``ndcg`` is the mean of 1 / log2(1 + r) where r <= k, and of 0 elsewhere (NDCG@k of one relevant
    item; He et al., WWW 2017, section 4.1).

    Args:
        loss: of each row of scores.
        k: length of the list that counts.
    """

    size = 4

    def __init__(self, loss: Callable[[Tensor], Tensor], k: int = 10) -> None:
        self._loss, self._k = loss, k
        self.metrics = metrics_at(k)

    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """See the base class; scores of shape (n, 1 + others). One tensor of shape (n, 4)."""
        scores = predictions.double()
        rank = 1 + (~(scores[:, 1:] < scores[:, :1])).sum(-1).double()  # what is not a number is not lower
        hit = (rank <= self._k).double()
        return (torch.stack([torch.ones_like(hit), hit, hit / torch.log2(1 + rank), self._loss(scores)], -1),)

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class."""
        return counted(found[0], mask).sum(-2)

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        return {metric.name: ratio(vectors[..., 1 + i], vectors[..., 0]) for i, metric in enumerate(self.metrics)}


def metrics_at(k: int) -> tuple[Metric, ...]:
    """Returns the metrics of lists of k items."""
    return (
        Metric("hit_rate", f"HR@{k}", "higher", 100, 2, "%"),
        Metric("ndcg", f"NDCG@{k}", "higher"),
        Metric("loss", "loss", "lower", digits=4),
    )
