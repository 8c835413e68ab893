"""Accuracy and loss while a run goes on: against rounds, bytes sent, and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.errors import ConfigError, RunError
from rayfl.metrics import Metric
from rayfl.plots.metrics import bounds_of, first_of, measure
from rayfl.plots.phases import mark_phases
from rayfl.plots.series import Series, need_alike, seeds_together, series_of
from rayfl.plots.style import COLOURS, columns_for, dashes, draw_curve, legend_below, new_figure, whole_numbers
from rayfl.runs.folder import RunFolder
from rayfl.runs.measured import Cohort, Measured, Split
from rayfl.runs.rows import model_rows, models_in, received, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = {"rounds": "round", "bytes": "sent, both ways (MB)", "seconds": "training time (s)"}
_LEAST = 1.8
"""Width of a panel in inches below which the three are no figure to read."""
_COLUMNS = {"rounds": "round", "bytes": "megabytes", "seconds": "seconds"}


def draw(
    runs: Sequence[RunFolder],
    x: str | None = None,
    metric: str | None = None,
    model: str | None = None,
    split: Split = "test",
    cohort: Cohort = "all",
) -> tuple[Figure, pa.Table]:
    """Draws the mean of the first metric (accuracy) and the loss over all clients, with bands over seeds.

    Args:
        runs: any; those that differ in their seeds only are one curve, with a band of one sample standard deviation.
        x: ``rounds``, ``bytes`` (of all messages until then) or ``seconds`` (clients, server and commits, without
            evaluation); None: all three, or ``rounds`` alone in a figure as narrow as a paper's column.
        metric: the only one that is drawn, one of the task's; None: the first metric, and below it the loss.
        model: a row; None: the personalized model, and with other dashes the global one.
        split: ``validation``, ``test`` or ``official``.
        cohort: ``all`` that may train, or ``unseen`` for those held out from training.

    Raises:
        RayflError: for another x, and when rows or times are missing.
    """
    if x is not None and x not in _AXES:
        raise ConfigError(f"--x: there is no {x!r}; there are {', '.join(_AXES)}")
    shown = [x] if x is not None else list(_AXES) if columns_for(len(_AXES), _LEAST) == len(_AXES) else ["rounds"]
    first, tables = first_of(runs).name, [run.rounds for run in runs]
    names = dict.fromkeys((first, "loss") if metric is None else (metric,))
    metrics = {name: measure(name, tables) for name in names}
    every = series_of(runs)
    need_alike(every, metrics)
    rows = [
        row
        for series in every
        for name in _models(series, model, Measured(split, cohort))
        for row in _rows(series, name, Measured(split, cohort), shown, list(metrics))
    ]
    figure = new_figure(max(5.2, 0.6 + 3.1 * len(shown)), 1.2 + 1.7 * len(metrics))
    panels = figure.subplots(len(metrics), len(shown), squeeze=False, sharex="col", sharey="row")
    for line, drawn in enumerate(metrics.values()):
        for column, axis in enumerate(shown):
            axes = panels[line][column]
            _panel(axes, rows, drawn, axis)
            if line == len(metrics) - 1:
                axes.set_xlabel(_AXES[axis])
                if len(there := {float(x) for curve in axes.lines for x in curve.get_xdata()}) == 1:
                    axes.set_xticks(list(there))  # around a single place numbers are long, and lie over each other
            if column == 0:
                axes.set_ylabel(drawn.axis)
            if axis == "rounds":
                mark_phases(axes, runs, named=line == 0)
    legend_below(figure, panels[0][0])
    return figure, pa.Table.from_pylist(rows)


def _models(series: Series, model: str | None, measured: Measured) -> list[str | None]:
    """Returns the rows of a series that are drawn; None: the personalized model."""
    if model is not None:
        return [model]
    known = models_in(received(series.runs[0], measured.split, measured.cohort))
    return [None] if "global" not in known or series.runs[0].own.model == "global" else [None, "global"]


def _rows(
    series: Series, model: str | None, measured: Measured, shown: Sequence[str], metrics: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns a row for each round that all seeds have evaluated."""
    name = series.runs[0].own.label if model is None else model
    tables = [model_rows(run, model, measured.split, measured.cohort) for run in series.runs]
    rounds = [table["round"].to_pylist() for table in tables]
    found = {
        metric: seeds_together(
            [dict(zip(r, t[metric].to_pylist(), strict=True)) for r, t in zip(rounds, tables, strict=True)]
        )
        for metric in metrics
    }
    sent = seeds_together(
        [
            {
                r: (down + up) / 1e6
                for r, down, up in zip(*(t[c].to_pylist() for c in ("round", "bytes_down", "bytes_up")), strict=True)
            }
            for t in tables
        ]
    )
    fewest = {
        r: min(count for table in tables for count in where(table, round=r)["clients"].to_pylist())
        for r in found[metrics[0]]
    }
    seconds = seeds_together([_seconds(run) for run in series.runs]) if "seconds" in shown else None
    result = []
    for round in found[metrics[0]]:
        row: dict[str, Any] = {"series": series.label, "model": name, "round": round, "megabytes": sent[round][0]}
        if seconds is not None:
            if round not in seconds:
                raise RunError(f"{series.runs[0].uri}: timings.jsonl lacks rounds up to round {round}; use --x rounds")
            row["seconds"] = seconds[round][0]
        for metric in metrics:
            row |= {metric: found[metric][round][0], f"{metric}_std_over_seeds": found[metric][round][1]}
        result.append(row | {"clients": fewest[round], "seeds": len(series.runs)})
    return result


def _seconds(run: RunFolder) -> dict[int, float]:
    """Returns the seconds of training until each round; none from the first round on that has no times."""
    lines = [line for number, line in enumerate(run.timings, 1) if line["round"] == number]
    costs = [sum(line.get(phase, 0.0) for phase in ("clients", "server", "commit")) for line in lines]
    return dict(enumerate(accumulate(costs), 1))


def _panel(axes: Axes, rows: list[dict[str, Any]], metric: Metric, axis: str) -> None:
    """Draws a metric of all series against one of the axes."""
    labels = list(dict.fromkeys(row["series"] for row in rows))
    for label, model in dict.fromkeys((row["series"], row["model"]) for row in rows):
        mine = [row for row in rows if (row["series"], row["model"]) == (label, model)]
        xs = np.array([row[_COLUMNS[axis]] for row in mine])
        mean = metric.scale * np.array([row[metric.name] for row in mine])
        spread = metric.scale * np.array([row[f"{metric.name}_std_over_seeds"] for row in mine])
        dashed = model == "global" and any(row["series"] == label and row["model"] != model for row in rows)
        band = spread if mine[0]["seeds"] > 1 else None
        place = labels.index(label)
        # The dashes of the next round of colours: where the own curve is dashed, the global one's are others.
        linestyle = dashes(place + len(COLOURS)) if dashed else None
        draw_curve(axes, place, f"{label} ({model})", xs, mean, band, bounds_of(metric), linestyle)
    if axis == "rounds":
        whole_numbers(axes)
