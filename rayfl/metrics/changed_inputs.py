"""Classification of changed inputs: samples with the trigger of a backdoor, and samples made to mislead a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.classification import ClassificationMeasures
from rayfl.metrics.measures import Metric, ratio
from rayfl.metrics.statistics import Statistics

ASR = Metric("asr", "attack success", "lower", 100, 2, "%")
"""Of samples with the trigger, the share taken for the target (Bagdasaryan et al., AISTATS 2020)."""

ROBUST = Metric("robust_top1", "robust accuracy", "higher", 100, 2, "%")
"""Of samples that were changed to mislead the model, the share taken for what they are (Madry et al., ICLR 2018)."""

CHANGED_SPLITS = {ASR: ("test", "official"), ROBUST: ("validation", "test", "official")}
"""The splits whose samples are scored changed, too."""

ASKED_BY = {ASR: "attack.backdoor", ROBUST: "evaluation.adversarial"}
"""The options that ask for them."""

_WHY = {
    ASR: "they have no sample of another class than the target",
    ROBUST: "they have no sample, or what is predicted of one has no slope in it",
}

_N, _HITS = 0, 2
"""Places of the number of samples and of the top-1 hits (:func:`rayfl.metrics.batch_statistics`)."""


class ChangedMeasures(ClassificationMeasures):
    """Those of classification, and two more sums for each kind of change: changed samples, and the hits among them.

    Each kind's metric is their quotient. Sums over samples as they are have 0 there; :func:`with_changed` adds them.

    Args:
        further: see the base class.
        classes: see the base class.
        thresholds: see the base class.
        groups: see the base class.
        people: see the base class.
        changes: the kinds, :data:`ASR` or :data:`ROBUST`, each once.
    """

    def __init__(
        self,
        further: Sequence[str] = (),
        classes: int = 0,
        thresholds: int = 101,
        groups: np.ndarray | None = None,
        people: int = 0,
        changes: Sequence[Metric] = (ASR,),
    ) -> None:
        super().__init__(further, classes, thresholds, groups, people)
        self.places = {metric: self.size + 2 * number for number, metric in enumerate(changes)}
        self.size += 2 * len(changes)
        self.metrics = (*self.metrics, *changes)

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class."""
        sums = super().added(found, mask)
        return torch.cat([sums, sums.new_zeros(*sums.shape[:-1], 2 * len(self.places))], -1)

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        found = {one.name: ratio(vectors[..., at + 1], vectors[..., at]) for one, at in self.places.items()}
        return {**super().values(vectors), **found}

    def measured_on(self, name: str, split: str) -> bool:
        """See the base class."""
        metric = self._changed(name)
        return metric is None or split in CHANGED_SPLITS[metric]

    def undefined(self, name: str) -> str:
        """See the base class."""
        metric = self._changed(name)
        return super().undefined(name) if metric is None else _WHY[metric]

    def _changed(self, name: str) -> Metric | None:
        return next((metric for metric in self.places if metric.name == name), None)


def with_changed(plain: Statistics, metric: Metric, changed: Statistics) -> Statistics:
    """Returns the statistics of samples with the two sums over changed ones.

    Args:
        plain: of the samples as they are.
        metric: the kind of change.
        changed: of changed samples, with the labels that they are to have; both of the same :class:`ChangedMeasures`.
    """
    assert isinstance(plain.measures, ChangedMeasures)
    vector, place = plain.vector.copy(), plain.measures.places[metric]
    vector[place : place + 2] = changed.vector[[_N, _HITS]]
    return Statistics(vector, plain.measures)
