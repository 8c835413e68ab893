"""The clients' accuracies, from the worst to the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rayfl.plots.metrics import first_of, measure
from rayfl.plots.series import series_of
from rayfl.plots.style import COLOURS, colour, draw_curve, legend_below, new_figure, wrapped
from rayfl.runs.folder import RunFolder
from rayfl.runs.listing import listed_clients
from rayfl.runs.measured import Cohort, Split

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = tuple[str, np.ndarray, np.ndarray]
"""Label, shares and values of a series; both of shape (K,)."""
_PANEL_IN, _TITLE_LINE_IN = 1.05, 0.17
"""Least width and height of a panel where each series has its own, and the height of a further line of its title."""


def draw(
    runs: Sequence[RunFolder],
    metric: str | None = None,
    model: str | None = None,
    split: Split = "test",
    cohort: Cohort = "all",
) -> tuple[Figure, pa.Table]:
    """Draws a metric of every client after the last evaluation, sorted, against the share of clients below.

    The worst twentieth, whose mean the tables have as ``top1_worst5``, is shaded. All seeds' clients are pooled. Of
    more series than there are colours, each has a panel of its own.

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
    rows: list[dict[str, Any]] = []
    curves: list[Curve] = []
    for series in series_of(runs):
        found: list[dict[str, Any]] = []
        for run in series.runs:
            listed, name, round = listed_clients(run, model, split, None, cohort)
            key: dict[str, Any] = {"series": series.label, "seed": run.config.seed, "model": name, "round": round}
            found += [key | {column: row[column] for column in ("client", "name", "n", metric)} for row in listed]
        found = sorted((row for row in found if row[metric] is not None), key=lambda row: row[metric])
        rows += found
        share = (np.arange(len(found)) + 0.5) / len(found)
        values = shown.scale * np.array([row[metric] for row in found])
        curves.append((series.label, 100 * share, values))
    held = " held out from training" if cohort == "unseen" else ""
    words = f"clients{held} (%), sorted", shown.axis
    figure = (_together if len(curves) <= len(COLOURS) else _apart)(curves, *words)
    for axes in figure.axes:
        axes.axvspan(*((0, 5) if shown.better == "higher" else (95, 100)), color="0.93", zorder=0)
        axes.set_xlim(0, 100)
    return figure, pa.Table.from_pylist(rows)


def _together(curves: Sequence[Curve], across: str, up: str) -> Figure:
    """Returns a figure with all series in one panel."""
    figure = new_figure(4.6, 3.5)
    axes = figure.subplots()
    for position, curve in enumerate(curves):
        draw_curve(axes, position, *curve)
    axes.set(xlabel=across, ylabel=up)
    legend_below(figure, axes)
    return figure


def _apart(curves: Sequence[Curve], across: str, up: str) -> Figure:
    """Returns a figure with a panel for each series, in which all others are grey."""
    figure = new_figure(6.4, 3.5)
    columns = int(figure.get_figwidth() / _PANEL_IN)
    lines = -(-len(curves) // columns)
    titles = [wrapped(label, 0.8 * figure.get_figwidth() / columns) for label, _, _ in curves]
    figure.set_figheight(0.5 + lines * (_PANEL_IN + _TITLE_LINE_IN * max(title.count("\n") for title in titles)))
    panels = list(figure.subplots(lines, columns, sharex=True, sharey=True).flat)
    for position, (axes, title, curve) in enumerate(zip(panels, titles, curves, strict=False)):
        for _, share, values in curves:
            axes.plot(share, values, color="0.8", linewidth=0.5)
        axes.plot(*curve[1:], color=colour(position))
        axes.set_title(title)
        axes.tick_params(labelbottom=position + columns >= len(curves))
    for axes in panels[len(curves) :]:
        axes.remove()
    figure.supxlabel(across, fontsize="medium")
    figure.supylabel(up, fontsize="medium")
    return figure
