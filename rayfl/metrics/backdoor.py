"""Classification under a backdoor: also the share of samples with the trigger that are taken for the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rayfl.metrics.classification import ClassificationMeasures
from rayfl.metrics.measures import Metric, ratio
from rayfl.metrics.statistics import Statistics

ASR = Metric("asr", "attack success", "lower", 100, 2, "%")
"""The attack success rate (Bagdasaryan et al., AISTATS 2020: accuracy of the backdoor)."""

TRIGGERED = ("test", "official")
"""The splits that are also scored with the trigger."""

_N, _HITS = 0, 2
"""Places of the number of samples and of the top-1 hits (:func:`rayfl.metrics.batch_statistics`)."""


class BackdoorMeasures(ClassificationMeasures):
    """Those of classification, and two more sums at the end: samples with the trigger, and how many the target got.

    ``asr`` is their quotient. Sums over samples without a trigger have 0 there; :func:`with_triggered` adds them.

    Args:
        further: see the base class.
        classes: see the base class.
        thresholds: see the base class.
        groups: see the base class.
        people: see the base class.
    """

    def __init__(
        self,
        further: Sequence[str] = (),
        classes: int = 0,
        thresholds: int = 101,
        groups: np.ndarray | None = None,
        people: int = 0,
    ) -> None:
        super().__init__(further, classes, thresholds, groups, people)
        self.size += 2
        self.metrics = (*self.metrics, ASR)

    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """See the base class."""
        sums = super().added(found, mask)
        return torch.cat([sums, sums.new_zeros(*sums.shape[:-1], 2)], -1)

    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """See the base class."""
        return {**super().values(vectors), ASR.name: ratio(vectors[..., -1], vectors[..., -2])}

    def measured_on(self, name: str, split: str) -> bool:
        """See the base class."""
        return name != ASR.name or split in TRIGGERED

    def undefined(self, name: str) -> str:
        """See the base class."""
        return "they have no sample of another class than the target" if name == ASR.name else super().undefined(name)


def with_triggered(plain: Statistics, triggered: Statistics) -> Statistics:
    """Returns the statistics of samples with the two sums over the same samples of other classes with the trigger.

    Args:
        plain: of the samples as they are.
        triggered: of those of other classes, with the trigger and the target as their label; both of
            :class:`BackdoorMeasures`.
    """
    vector = plain.vector.copy()
    vector[-2:] = triggered.vector[[_N, _HITS]]
    return Statistics(vector, plain.measures)
