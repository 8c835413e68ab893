"""The sufficient statistics of any set of samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rayfl.metrics.classification import CLASSIFICATION, bins_of
from rayfl.metrics.measures import Measures


@dataclass(frozen=True, eq=False)
class Statistics:
    """Sufficient statistics of any set of samples; add two to get those of their union.

    Attributes:
        vector: float64 of shape (``measures.size``,), laid out as by ``measures.statistics``.
        measures: what is read off it; those of classification without further metrics if not given.
    """

    vector: np.ndarray
    measures: Measures = CLASSIFICATION

    @classmethod
    def from_vector(cls, vector: Tensor | np.ndarray, measures: Measures = CLASSIFICATION) -> Statistics:
        """Wraps a copy of a vector from any device; raises ValueError unless its shape is (``measures.size``,)."""
        values = vector.detach().cpu().numpy() if isinstance(vector, Tensor) else vector
        if values.shape != (measures.size,):
            raise ValueError(f"statistics are a vector of length {measures.size}, not of shape {values.shape}")
        return cls(np.array(values, dtype=np.float64), measures)

    @classmethod
    def empty(cls, measures: Measures = CLASSIFICATION) -> Statistics:
        """The statistics of no samples: the start value of a sum over clients."""
        return cls(np.zeros(measures.size), measures)

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(self.vector + other.vector, self.measures)

    @property
    def n(self) -> int:
        """Number of samples."""
        return int(self.vector[0])

    def metrics(self) -> dict[str, float]:
        """All metrics of the task by name; nan where one is undefined, as all are without samples."""
        return {name: float(value) for name, value in self.measures.values(self.vector).items()}

    @property
    def first(self) -> float:
        """The metric by which models are chosen (accuracy in classification); nan where it is undefined."""
        return self.metrics()[self.measures.first.name]

    @property
    def merit(self) -> float:
        """The same, with its sign changed where less is better: the best model has the greatest."""
        return self.measures.first.sign * self.first

    @property
    def loss(self) -> float:
        """Mean of the task's loss; nan without samples."""
        return self.metrics()["loss"]

    @property
    def top1(self) -> float:
        """Of classification: share of samples whose label is the most probable class; nan without samples."""
        return self.metrics()["top1"]

    @property
    def top5(self) -> float:
        """Of classification: share of samples whose label is among the five most probable classes."""
        return self.metrics()["top5"]

    @property
    def ece(self) -> float:
        """Of classification: expected calibration error in [0, 1] (Guo et al., 2017, equation 3)."""
        return self.metrics()["ece"]

    @property
    def mce(self) -> float:
        """Of classification: maximum calibration error over non-empty bins, in [0, 1] (Guo et al., 2017, eq. 5)."""
        return self.metrics()["mce"]

    def bins(self) -> np.ndarray:
        """Of classification, by bin of the confidence, shape (3, ``NUM_BINS``): samples, sum of their confidences,
        top-1 hits."""
        return bins_of(self.vector)
