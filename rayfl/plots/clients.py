"""The clients' accuracies, from the worst to the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.plots.metrics import first_of, measure
from rayfl.plots.series import series_of
from rayfl.plots.style import draw_curve, legend_below, new_figure
from rayfl.runs.folder import RunFolder
from rayfl.runs.listing import listed_clients
from rayfl.runs.measured import Cohort, Split

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(
    runs: Sequence[RunFolder],
    metric: str | None = None,
    model: str | None = None,
    split: Split = "test",
    cohort: Cohort = "all",
) -> tuple[Figure, pa.Table]:
    """Draws a metric of every client after the last evaluation, sorted, against the share of clients below.

    The worst twentieth, whose mean the tables have as ``top1_worst5``, is shaded. All seeds' clients are pooled.

    Args:
        runs: any.
        metric: one of the task's; None: its first.
        model: a row of the tables; None: the method's personalized model.
        split: ``validation``, ``test`` or ``official``.
        cohort: ``all`` that may train, or ``unseen`` for those held out from training.

    Raises:
        RayflError: for another metric, and when a run has no such rows.
    """
    metric = first_of(runs).name if metric is None else metric
    shown = measure(metric, [run.clients for run in runs])
    figure = new_figure(4.6, 3.5)
    axes = figure.subplots()
    rows: list[dict[str, Any]] = []
    for position, series in enumerate(series_of(runs)):
        found: list[dict[str, Any]] = []
        for run in series.runs:
            listed, name, round = listed_clients(run, model, split, None, cohort)
            key: dict[str, Any] = {"series": series.label, "seed": run.config.seed, "model": name, "round": round}
            found += [key | {column: row[column] for column in ("client", "name", "n", metric)} for row in listed]
        found = sorted((row for row in found if row[metric] is not None), key=lambda row: row[metric])
        rows += found
        share = (np.arange(len(found)) + 0.5) / len(found)
        values = shown.scale * np.array([row[metric] for row in found])
        draw_curve(axes, position, series.label, 100 * share, values)
    worst = (0, 5) if shown.better == "higher" else (95, 100)
    axes.axvspan(*worst, color="0.93", zorder=0)
    held = " held out from training" if cohort == "unseen" else ""
    axes.set(xlabel=f"clients{held} (%), sorted", ylabel=shown.axis, xlim=(0, 100))
    legend_below(figure, axes)
    return figure, pa.Table.from_pylist(rows)
