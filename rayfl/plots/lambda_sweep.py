"""A metric against lambda, from the federated model (0) to the local one (1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.errors import ConfigError, RunError
from rayfl.plots.metrics import bounds_of, first_of, measure
from rayfl.plots.series import Series, need_methods, series_of
from rayfl.plots.style import LAMBDA, draw_curve, legend_below, new_figure
from rayfl.runs.folder import RunFolder
from rayfl.runs.measured import Split
from rayfl.runs.rows import last_of_seeds, last_round, received, where

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(runs: Sequence[RunFolder], metric: str | None = None, split: Split = "test") -> tuple[Figure, pa.Table]:
    """Draws the mean over clients after the last round, with a band of one standard deviation over clients.

    Means and standard deviations are averaged over seeds. Runs of APFL with fixed alpha are the points of one more
    line, at their alpha: its mixture of federated and local model.

    Args:
        runs: of SuperFed-like methods, which sweep, and of APFL.
        metric: one of the task's; None: its first.
        split: ``validation`` or ``test``.

    Raises:
        RayflError: for runs of other methods, and when the sweep was not evaluated.
    """
    metric = first_of(runs).name if metric is None else metric
    shown = measure(metric, [run.rounds for run in runs])
    _check(runs)
    rows = [row for series in series_of(runs) for row in _rows(series, metric, split)]
    figure = new_figure(4.6, 3.6)
    axes = figure.subplots()
    for position, label in enumerate(dict.fromkeys(row["series"] for row in rows)):
        mine = sorted((row for row in rows if row["series"] == label), key=lambda row: row["lambda"])
        xs, mean, spread = (
            np.array([row[column] for row in mine]) for column in ("lambda", metric, f"{metric}_std_over_clients")
        )
        draw_curve(axes, position, label, xs, shown.scale * mean, shown.scale * spread, bounds_of(shown))
    axes.set(xlabel=f"{LAMBDA} (0: federated model, 1: local model)", ylabel=shown.axis, xlim=(-0.02, 1.02))
    legend_below(figure, axes)
    return figure, pa.Table.from_pylist(rows)


def _check(runs: Sequence[RunFolder]) -> None:
    for run in runs:
        algorithm = run.config.algorithm
        if algorithm.name == "apfl" and algorithm.adaptive:
            raise ConfigError(f"{run.uri}: with algorithm.adaptive=true every client has an alpha of its own")
        if run.own.sweep is None:
            need_methods([run], ["superfed", "apfl"], "the figure lambda")


def _rows(series: Series, metric: str, split: Split) -> list[dict[str, Any]]:
    algorithm = series.config.algorithm
    if algorithm.name == "apfl":
        return [
            _row(
                series.runs[0].printed,
                series,
                metric,
                algorithm.alpha,
                last_of_seeds(series.runs, series.runs[0].own.model, split),
            )
        ]
    own = series.runs[0].own
    prefix = f"{own.sweep}="
    table = received(series.runs[0], split)
    names = [
        name
        for name in (
            where(table, selected_on="", round=last_round(table))["model"].to_pylist() if table.num_rows else []
        )
        if own.is_member(name)
    ]
    if not names:
        raise RunError(
            f"{series.runs[0].uri} has no rows {prefix}... in the split {split}: the second phase has not "
            "begun (algorithm.start), or the run is not at its end"
        )
    return [
        _row(
            series.label,
            series,
            metric,
            float(name.removeprefix(prefix)),
            last_of_seeds(series.runs, name, split),
        )
        for name in names
    ]


def _row(label: str, series: Series, metric: str, value: float, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "series": label,
        "lambda": value,
        "round": found[0]["round"],
        metric: float(np.mean([row[metric] for row in found])),
        f"{metric}_std_over_clients": float(np.mean([row[f"{metric}_std"] for row in found])),
        "clients": min(row["clients"] for row in found),
        "seeds": len(series.runs),
    }
