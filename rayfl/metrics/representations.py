"""Representations learned without labels: votes of neighbours, a linear classifier, and signs of a collapse."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.metrics.measures import Measures, Metric, ratio

Further = Literal["linear_top1"]
_VOTES = 1 << 22
"""Votes or similarities that are computed at a time: 16 MiB of them."""
KNN = Metric("knn_top1", "kNN accuracy", "higher", scale=100, digits=1, unit="%")
LINEAR = Metric("linear_top1", "linear probe accuracy", "higher", scale=100, digits=1, unit="%")
_OTHERS = (
    Metric("loss", "loss", "lower", digits=4),
    Metric("feature_std", "feature std", "higher", digits=3, ranked=False),
)


def nearest_classes(
    features: Tensor, known: Tensor, labels: Tensor, classes: int, neighbours: int, temperature: float, own: bool
) -> Tensor:
    """Returns the classes for which the nearest known samples vote (Wu et al., CVPR 2018, section 3.4).

    The k known samples of the largest cosines s vote with the weight exp(s / temperature). Of equally near samples the
    first ones count, and of classes with equal votes the first one.

    Args:
        features: of length 1, shape (n, f).
        known: of the known samples, of length 1, shape (m, f); m is 1 at least, 2 where they are the samples.
        labels: of the known samples, int64 of shape (m,).
        classes: C.
        neighbours: k; all known samples, if these are fewer.
        temperature: of the votes.
        own: whether the samples are the known ones, so that each is left out of its own vote.

    Returns:
        int64 of shape (n,).
    """
    count = min(neighbours, len(known) - own)
    rows = max(_VOTES // max(len(known), count * classes), 1)
    found = []
    for first in range(0, len(features), rows):
        cosines = features[first : first + rows] @ known.mT
        if own:
            place = torch.arange(first, first + len(cosines), device=cosines.device)
            cosines = cosines.scatter(1, place[:, None], -torch.inf)
        nearest, places = (one[:, :count] for one in cosines.sort(dim=1, descending=True, stable=True))
        weights = (nearest / temperature).exp()
        votes = (weights[..., None] * F.one_hot(labels[places], classes)).sum(1)
        found.append(votes.argmax(1))
    return torch.cat(found)


def linear_classes(features: Tensor, known: Tensor, labels: Tensor) -> Tensor:
    """Returns the classes that a logistic regression on the known samples' features predicts.

    It is scikit-learn's, with its default penalty, on features divided by the known samples' standard deviations.

    Args:
        features: shape (n, f).
        known: of the known samples, shape (m, f); m is 1 at least.
        labels: of the known samples, int64 of shape (m,).

    Returns:
        int64 of shape (n,), on the device of ``features``.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    given, asked, classes = (one.detach().cpu().numpy() for one in (known.double(), features.double(), labels))
    if len(np.unique(classes)) == 1:
        found: Tensor = labels[:1].expand(len(features))
        return found
    deviation = given.std(0)
    deviation = np.where(deviation > 0, deviation, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a classifier that is nearly there is as good a measure
        fitted = LogisticRegression(max_iter=200).fit(given / deviation, classes)
    predicted: Tensor = torch.from_numpy(fitted.predict(asked / deviation)).to(features.device)
    return predicted


def spread(features: Tensor) -> Tensor:
    """Returns the mean standard deviation of features of length 1 over samples, times sqrt(f); a scalar.

    It is 0 where all samples have one feature, as after a collapse, and at most 1 (Chen and He, CVPR 2021, figure 2).

    Args:
        features: shape (n, f).
    """
    found: Tensor = features.std(0, correction=0).mean() * features.shape[1] ** 0.5
    return found


class RepresentationMeasures(Measures):
    """The share of samples whose class other samples' features predict, the mean loss, and :func:`spread`.

    Statistics are of rows of numbers of each sample, which the task makes of its features, of those of the client's
    training samples and of the losses of two views: the loss, the spread of the split, whether there is a training
    sample to compare with, whether the nearest of these have the right class and, where it is asked for, whether the
    linear classifier has. The spread of several clients together is the mean of theirs.

    Args:
        further: metrics beyond the usual ones.
    """

    compares = True

    def __init__(self, further: Sequence[Further] = ()) -> None:
        self.linear = "linear_top1" in further
        self.metrics = (KNN, *[LINEAR] * self.linear, *_OTHERS)
        self.size = 5 + self.linear

    def statistics(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """See the base class; predictions of shape (n, ``size`` - 1), as the class describes them."""
        rows = predictions.double()
        return torch.cat([rows.new_full((1,), len(rows)), rows.sum(0)])

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        count, compared = vectors[..., 0], vectors[..., 3]
        found = {"knn_top1": ratio(vectors[..., 4], compared)}
        if self.linear:
            found["linear_top1"] = ratio(vectors[..., 5], compared)
        return {**found, "loss": ratio(vectors[..., 1], count), "feature_std": ratio(vectors[..., 2], count)}

    def undefined(self, name: str) -> str:
        """See the base class."""
        return "they have no training samples to compare with" if name.endswith("top1") else ""
