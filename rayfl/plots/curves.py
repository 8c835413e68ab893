"""Accuracy and loss while a run goes on: against rounds, bytes sent, and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.errors import ConfigError, RunError
from rayfl.plots.phases import mark_phases
from rayfl.plots.series import Series, over_seeds, series_of
from rayfl.plots.style import Measure, colour, first_of, legend_below, marker, measure, new_figure
from rayfl.runs.folder import RunFolder
from rayfl.runs.rows import model_rows, models_in, received, where

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_AXES = {"rounds": "round", "bytes": "sent, both ways (MB)", "seconds": "training time (s)"}
_COLUMNS = {"rounds": "round", "bytes": "megabytes", "seconds": "seconds"}
_FEW = 12
"""Curves with more evaluations have no markers."""


def draw(
    runs: Sequence[RunFolder],
    x: str | None = None,
    model: str | None = None,
    split: str = "test",
    cohort: str = "all",
) -> tuple[Figure, pa.Table]:
    """Mean of the first metric (accuracy) and loss over all clients; a band is the standard deviation over seeds.

    Args:
        runs: any; those that differ in their seeds only are one curve.
        x: ``rounds``, ``bytes`` (of all messages until then) or ``seconds`` (clients, server and commits, without
            evaluation); None: all three.
        model: a row; None: the personalized model, and dashed the global one.
        split: ``validation`` or ``test``.
        cohort: ``all`` that may train, or ``unseen`` for those held out from training.

    Raises:
        RayflError: for another x, and when rows or times are missing.
    """
    if x is not None and x not in _AXES:
        raise ConfigError(f"--x: there is no {x!r}; there are {', '.join(_AXES)}")
    shown = list(_AXES) if x is None else [x]
    first, tables = first_of(runs).name, [run.rounds for run in runs]
    metrics = (first, "loss")
    rows = [
        row
        for series in series_of(runs)
        for name in _models(series, model, split, cohort)
        for row in _rows(series, name, split, shown, metrics, cohort)
    ]
    figure = new_figure(max(5.2, 0.6 + 3.1 * len(shown)), 4.6)
    panels = figure.subplots(2, len(shown), squeeze=False, sharex="col", sharey="row")
    for line, metric in enumerate(metrics):
        for column, axis in enumerate(shown):
            axes = panels[line][column]
            _panel(axes, rows, metric, axis, measure(metric, tables))
            if line == 1:
                axes.set_xlabel(_AXES[axis])
            if column == 0:
                axes.set_ylabel(measure(metric, tables).label)
            if axis == "rounds":
                mark_phases(axes, runs, named=line == 0)
    legend_below(figure, panels[0][0])
    return figure, pa.Table.from_pylist(rows)


def _models(series: Series, model: str | None, split: str, cohort: str) -> list[str | None]:
    """The rows of a series that are drawn; None: the personalized model."""
    if model is not None:
        return [model]
    known = models_in(received(series.runs[0], split, cohort))
    return [None] if "global" not in known or series.runs[0].own.model == "global" else [None, "global"]


def _rows(
    series: Series, model: str | None, split: str, shown: Sequence[str], metrics: Sequence[str], cohort: str
) -> list[dict[str, Any]]:
    """A row per round that all seeds have evaluated."""
    name = series.runs[0].own.label if model is None else model
    tables = [model_rows(run, model, split, cohort).sort_by("round") for run in series.runs]
    rounds = [table["round"].to_pylist() for table in tables]
    found = {
        metric: over_seeds(
            [dict(zip(r, t[metric].to_pylist(), strict=True)) for r, t in zip(rounds, tables, strict=True)]
        )
        for metric in metrics
    }
    sent = over_seeds(
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
    seconds = over_seeds([_seconds(run) for run in series.runs]) if "seconds" in shown else {}
    result = []
    for round in found[metrics[0]]:
        row: dict[str, Any] = {"series": series.label, "model": name, "round": round, "megabytes": sent[round][0]}
        if seconds:
            if round not in seconds:
                raise RunError(f"{series.runs[0].storage.uri}: timings.jsonl lacks round {round}; use --x rounds")
            row["seconds"] = seconds[round][0]
        for metric in metrics:
            row |= {metric: found[metric][round][0], f"{metric}_std_over_seeds": found[metric][round][1]}
        result.append(row | {"clients": fewest[round], "seeds": len(series.runs)})
    return result


def _seconds(run: RunFolder) -> dict[int, float]:
    """Seconds of training until a round."""
    lines = run.timings
    costs = [sum(line.get(phase, 0.0) for phase in ("clients", "server", "commit")) for line in lines]
    return dict(zip((int(line["round"]) for line in lines), accumulate(costs), strict=True))


def _panel(axes: Axes, rows: list[dict[str, Any]], metric: str, axis: str, shown: Measure) -> None:
    factor = shown.factor
    labels = list(dict.fromkeys(row["series"] for row in rows))
    few = len({row["round"] for row in rows}) <= _FEW
    for label, model in dict.fromkeys((row["series"], row["model"]) for row in rows):
        mine = [row for row in rows if (row["series"], row["model"]) == (label, model)]
        xs = np.array([row[_COLUMNS[axis]] for row in mine])
        mean = factor * np.array([row[metric] for row in mine])
        spread = factor * np.array([row[f"{metric}_std_over_seeds"] for row in mine])
        position = labels.index(label)
        dashed = model == "global" and any(row["series"] == label and row["model"] != model for row in rows)
        axes.plot(
            xs,
            mean,
            color=colour(position),
            linestyle="--" if dashed else "-",
            marker=marker(position) if few else None,
            label=f"{label} ({model})",
        )
        if mine[0]["seeds"] > 1:
            axes.fill_between(xs, mean - spread, mean + spread, color=colour(position), alpha=0.2, linewidth=0)
