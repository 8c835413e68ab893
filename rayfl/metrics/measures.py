"""What a task is judged by: sums over samples, and the metrics that they make."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

DIVERGED = "what their models say is not finite: their training has diverged"
"""Why a metric of a task may be undefined that is defined for all finite predictions."""


@dataclass(frozen=True)
class Metric:
    """A number that tables have in a column.

    Attributes:
        name: of the column.
        label: for people, without the unit.
        better: whether more is better, or less.
        scale: what values are multiplied by where they are shown.
        digits: shown behind the point.
        unit: of what is shown: ``%``, ``nats``, or nothing.
        ranked: whether a value is better the further it is that way; else it should be near one, and none is the best.
    """

    name: str
    label: str
    better: Literal["higher", "lower"]
    scale: float = 1
    digits: int = 3
    unit: str = ""
    ranked: bool = True

    @property
    def heading(self) -> str:
        """Label and unit, for the head of a column."""
        return f"{self.label} {self.unit}".rstrip()

    @property
    def axis(self) -> str:
        """Label and unit, for an axis of a figure."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def sign(self) -> int:
        """1 if more is better, -1 if less is."""
        return 1 if self.better == "higher" else -1

    @property
    def mode(self) -> Literal["max", "min"]:
        """The same, as :func:`rayfl.metrics.first_best` takes it."""
        return "max" if self.better == "higher" else "min"

    def shown(self, value: float | None) -> str:
        """A value as people read it; a dash for one that is missing or undefined."""
        return "-" if value is None or np.isnan(value) else f"{self.scale * value:.{self.digits}f}"

    def told(self, value: float | None) -> str:
        """A value with its unit, in one word where it is a share; a dash for one that is missing or undefined."""
        text = self.shown(value)
        return text if not self.unit or text == "-" else f"{text}{'' if self.unit == '%' else ' '}{self.unit}"


class Measures(ABC):
    """How predictions are scored: a vector of sums for each batch, and the metrics of a sum of such vectors.

    The first entry of a vector is the number of samples. Sums of counts are exact; those of losses are added in
    double precision, in an order that is the same on every machine.

    Attributes:
        size: entries of a vector.
        metrics: what can be read off it. The first is the one by which models are chosen and clients are ranked.
        compares: whether samples are compared with each other. A client's split is then scored as a whole, while the
            statistics of other measures are sums over its batches.
    """

    size: int
    metrics: tuple[Metric, ...]
    compares: bool = False

    @property
    def first(self) -> Metric:
        """The metric by which models are chosen and clients are ranked."""
        return self.metrics[0]

    @abstractmethod
    def statistics(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """The sums of a batch, on its device, without waiting for it.

        Args:
            predictions: as the task makes them, one row a sample, n >= 0 rows.
            targets: of the samples, n rows.

        Returns:
            float64 of shape (``size``,).
        """

    @abstractmethod
    def values(self, vectors: np.ndarray) -> Mapping[str, np.ndarray]:
        """The metrics of many sets of samples; nan where one is undefined.

        Args:
            vectors: the sets' sums, float64 of shape (..., ``size``).

        Returns:
            By metric, float64 of shape (...).
        """

    def targets(self, y: Tensor, group: Tensor | None) -> Tensor:
        """Returns what samples are scored by, one row a sample, as :meth:`statistics` takes it; by default ``y``.

        Args:
            y: the samples' targets, n rows.
            group: of which group of people each is, int64 of shape (n,); None where the data do not say that.
        """
        return y

    def classes_of(self, targets: Tensor) -> Tensor:
        """Returns the samples' classes, int64 of shape (n,), of what :meth:`targets` has made, where they have one."""
        return targets

    def measured_on(self, name: str, split: str) -> bool:
        """Returns whether a metric is measured on a split; where it is not it is null, and nobody is told."""
        return True

    def undefined(self, name: str) -> str:
        """Returns why a metric may be undefined for a set that has samples, in words; empty where it never is."""
        return ""


class MeasuresBySample(Measures):
    """Measures whose sums can be taken apart by sample.

    What :meth:`by_sample` finds may come from one pass over the samples of many clients; :meth:`added` then makes each
    client's own sums.
    """

    @abstractmethod
    def by_sample(self, predictions: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        """Returns what enters the sums, of each sample: tensors of n rows; see :meth:`statistics`."""

    @abstractmethod
    def added(self, found: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """The sums of sets of samples.

        Args:
            found: what :meth:`by_sample` found, each of shape (..., n, *of a sample).
            mask: which samples count, bool of shape (..., n); None: all do.

        Returns:
            float64 of shape (..., ``size``).
        """

    def statistics(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """See the base class."""
        return self.added(self.by_sample(predictions, targets))


def counted(values: Tensor, mask: Tensor | None) -> Tensor:
    """Returns values of shape (..., n, k), 0 for samples that do not count (``mask``, shape (..., n))."""
    return values if mask is None else values.where(mask[..., None], 0)


def ratio(numerator: np.ndarray, denominator: np.ndarray, otherwise: float = np.nan) -> np.ndarray:
    """The quotient, or another value where the denominator is not above 0."""
    positive = denominator > 0
    found: np.ndarray = np.where(positive, numerator / np.where(positive, denominator, 1), otherwise)
    return found
