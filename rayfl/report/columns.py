"""The columns of tables that compare methods: those of the runs' task."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rayfl.errors import RunError
from rayfl.metrics import CLASSIFICATION
from rayfl.metrics import Metric as TaskMetric
from rayfl.report.rows import BEST_ROUND, final_by_key
from rayfl.results.schemas import metrics_of
from rayfl.runs.loading import Run

NO_NUMBER = "-"
"""What stands in a table where there is no number."""


@dataclass(frozen=True)
class Metric:
    """A column of the table.

    Attributes:
        column: of ``rounds.parquet``.
        heading: for people.
        scale: what values are multiplied by.
        digits: shown behind the point.
        sign: 1 if more is better, -1 if less is.
        by_client: whether clients have it, too, so that it has a spread over them.
        chosen: whether it is a choice among evaluations by the data that it is of: marked, never the best, not tested.
        alike: whether the compared runs define it alike; else no number is the best, and it is not tested.
        ranked: whether more, or less, of it is better at all; else likewise.
    """

    column: str
    heading: str
    scale: float
    digits: int
    sign: int
    by_client: bool = True
    chosen: bool = False
    alike: bool = True
    ranked: bool = True

    @property
    def comparable(self) -> bool:
        """Returns whether methods may be ranked and tested by it."""
        return self.alike and self.ranked and not self.chosen

    @property
    def measured(self) -> str:
        """Returns the metric of the task that it is of."""
        return re.sub(f"^pooled_|({BEST_ROUND}|_worst5|_jain)$", "", self.column)

    def text(self, value: float | None) -> str:
        """Returns a number of the column as text; a dash for one that is missing."""
        return NO_NUMBER if value is None or math.isnan(value) else f"{value:.{self.digits}f}"


METRICS = (
    Metric("top1", "accuracy %", 100, 2, 1),
    Metric("top1_worst5", "worst 5 %", 100, 2, 1, by_client=False),
    Metric("ece", "ECE", 1, 3, -1),
    Metric("loss", "loss", 1, 3, -1),
)
"""The columns of a comparison of classifiers where none are chosen, before their further metrics."""

_OTHERS = (
    Metric("top5", "top-5 accuracy %", 100, 2, 1),
    Metric("mce", "MCE", 1, 3, -1),
    Metric("top1_jain", "Jain's index", 1, 3, 1, by_client=False),
)


def columns_of(runs: Sequence[Run]) -> dict[str, Metric]:
    """Returns by column everything that methods can be compared by: the runs' task decides.

    Raises:
        RunError: they have different tasks.
    """
    shown = metrics_for(runs)
    first = shown[0]
    others: tuple[Metric, ...] = _OTHERS if first == METRICS[0] else ()
    fairness = Metric(f"{first.column}_jain", "Jain's index", 1, 3, 1, by_client=False)
    if not others and all(fairness.column in run.rounds.schema.names for run in runs):
        others = (fairness,)
    further = (*_of_all_samples(first), *(_pooled(metric) for metric in shown[1:] if metric.by_client))
    known = [set(run.rounds.schema.names) for run in runs]
    return {
        metric.column: metric
        for metric in (*shown, *others, *further)
        if metric.chosen or all(metric.column in names for names in known)
    }


def _of_all_samples(first: Metric) -> tuple[Metric, ...]:
    """The first metric of all samples together, and both forms of it in the best of all rounds."""
    label = first.heading.removesuffix(" %")
    unit = first.heading.removeprefix(label)
    pooled = _pooled(first)
    best = (
        replace(one, column=f"{one.column}{BEST_ROUND}", heading=f"best round, {name}{unit} *", chosen=True)
        for one, name in ((first, label), (pooled, f"pooled {label}"))
    )
    return (pooled, *(replace(one, by_client=False) for one in best))


def _pooled(metric: Metric) -> Metric:
    return replace(metric, column=f"pooled_{metric.column}", heading=f"pooled {metric.heading}", by_client=False)


def metrics_for(runs: Sequence[Run]) -> tuple[Metric, ...]:
    """Returns the columns of a comparison where none are chosen: of the metrics that all runs have.

    Raises:
        RunError: the runs have different tasks.
    """
    evaluated = [run for run in runs if final_by_key(run)] or runs
    found: dict[tuple[TaskMetric, ...], Run] = {}
    for run in evaluated:
        found.setdefault(metrics_of(run.rounds), run)
    if len({metrics[0] for metrics in found}) > 1:
        names = "; ".join(f"{run.uri} by {', '.join(m.name for m in metrics)}" for metrics, run in found.items())
        raise RunError(f"the runs have different tasks, whose numbers cannot be compared; judged are {names}")
    metrics = [metric for metric in next(iter(found)) if all(metric in others for others in found)]
    if metrics[0] == CLASSIFICATION.first:
        further = [metric for metric in metrics if metric not in CLASSIFICATION.metrics]
        return (*METRICS, *map(_column_of, further))
    first, *others = map(_column_of, metrics)
    worst = replace(first, column=f"{first.column}_worst5", heading="worst 5 %", by_client=False)
    known = all(worst.column in run.rounds.schema.names for run in evaluated)
    return (first, *((worst,) if known else ()), *others)


def _column_of(metric: TaskMetric) -> Metric:
    return Metric(metric.name, metric.heading, metric.scale, metric.digits, metric.sign, ranked=metric.ranked)
