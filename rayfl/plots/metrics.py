"""Chooses the metric that a figure shows, and checks that the runs have it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rayfl.errors import ConfigError
from rayfl.metrics import CLASSIFICATION, Metric
from rayfl.results.schemas import METRICS, first_metric, metrics_of
from rayfl.runs.folder import RunFolder


def measure(metric: str, tables: Sequence[pa.Table] = ()) -> Metric:
    """Returns the metric of a name, which says how its values are shown.

    Args:
        metric: its name.
        tables: of the runs that are drawn, which must have it.

    Raises:
        ConfigError: a run has no such metric.
    """
    every = [{one.name: one for one in metrics_of(table)} for table in tables or [pa.table({})]]
    for known in every:
        if metric not in known:
            shown = [*[name for name in METRICS if name in known], *[name for name in known if name not in METRICS]]
            what = "not all runs have" if any(metric in others for others in every) else "there is no"
            raise ConfigError(f"--metric: {what} {metric!r}; there are {', '.join(shown)}")
    return every[-1][metric]


def first_of(runs: Sequence[RunFolder]) -> Metric:
    """Returns the metric by which the runs of a figure are judged.

    Raises:
        ConfigError: they have different tasks.
    """
    firsts = list(dict.fromkeys(first_metric(run.rounds) for run in runs))
    if len(firsts) > 1:
        raise ConfigError(f"runs of several tasks are in no one figure: they are judged by {_listed(firsts)}")
    return firsts[0]


def need_accuracy(runs: Sequence[RunFolder], kind: str) -> None:
    """Raises ConfigError for runs of a task that has no accuracy, which a figure of a paper is of."""
    if (first := first_of(runs)) != CLASSIFICATION.first:
        raise ConfigError(f"{kind} is a figure of accuracies, but the runs are judged by {first.name}: draw curves")


def _listed(metrics: Sequence[Metric]) -> str:
    return ", ".join(metric.name for metric in metrics)


def bounds_of(metric: Metric) -> tuple[float, float]:
    """Returns the least and the largest value that a metric can have, in units of what is shown."""
    if metric.unit == "%":
        return 0, metric.scale
    if metric in CLASSIFICATION.metrics and metric.name != "loss":
        return 0, 1
    return 0 if metric.better == "lower" else -np.inf, np.inf
