"""Progress of runs and methods: a metric against rounds, bytes and wall time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pyarrow as pa

from rayfl.metrics import Metric
from rayfl.plots.metrics import bounds_of
from rayfl.plots.style import band, draw_curve, whole_numbers
from rayfl.report.blocks import Cell, Column, Table, number
from rayfl.report.cells import metric_cell, unit_of_bytes
from rayfl.report.charts import Axis, Chart, Series
from rayfl.report.drawing import Drawing, legend_above, table_of
from rayfl.report.grouping import Group, shown_model
from rayfl.report.rows import Curve, curve, drawn, evaluated, main_keys, shown_key
from rayfl.results.schemas import metrics_of
from rayfl.runs.curves import mean_over_seeds
from rayfl.runs.loading import Run

_AXES = (
    "By round, by bytes sent (down and up, of all clients), and by wall time (evaluation included); in the picture "
    "from left to right."
)

Lines = Sequence[tuple[str, Curve]]
Over = Literal["clients", "seeds"]


def progress_of_models(run: Run) -> list[Drawing | Table]:
    """Returns a figure of each of the first metric and the loss of a run's main models; none if never measured.

    Of a single evaluation it is a table: a curve of one point shows nothing.
    """
    everybody, after = run.measured.cohort != "selected", run.measured.phase == "trained"
    who = evaluated(run) if everybody else f"the round's cohort{', right after its local training' if after else ''}"
    found: list[Drawing | Table] = []
    for metric in _drawn(run):
        curves = [(key.label, curve(run, key, metric.name)) for key in main_keys(run)]
        lines = [(label, one) for label, one in curves if one is not None]
        if lines:
            title = f"{_title(metric)} of {'the clients' if everybody else who}"
            what = f"Mean {metric.label} on {run.measured.split} samples over {who}.{drawn([run])}"
            name = _file(metric) if everybody else f"cohort-{_file(metric)}"
            found.append(_shown(name, title, what, metric, lines, "clients"))
    return found


def progress_of_groups(groups: Sequence[Group]) -> list[Drawing | Table]:
    """Returns a figure of each of the first metric and the loss of the methods' personalized models.

    The curves are means over seeds, with bands of one sample standard deviation. Of single evaluations it is a table.
    """
    found: list[Drawing | Table] = []
    measured = groups[0].runs[0].measured
    for metric in _drawn(groups[0].runs[0]):
        curves = [(group.label, _mean_curve(group, metric.name)) for group in groups]
        lines = [(label, one) for label, one in curves if one is not None]
        if lines:
            what = (
                f"Mean {metric.label} on {measured.split} samples over {_clients(lines)}{measured.when}, of "
                f"{shown_model(groups)}. With several seeds: the mean over them, and a band of one sample standard "
                f"deviation.{drawn(run for group in groups for run in group.runs)}"
            )
            found.append(_shown(_file(metric), f"{_title(metric)} of the methods", what, metric, lines, "seeds"))
    return found


def _mean_curve(group: Group, metric: str) -> Curve | None:
    """Returns the mean over the seeds at the rounds that all have; the spread is over seeds, and nan with one."""
    keys = [shown_key(run) for run in group.runs]
    found = [curve(run, key, metric) for run, key in zip(group.runs, keys, strict=True) if key is not None]
    curves = [one for one in found if one is not None]
    if not curves:
        return None
    rounds = curves[0].rounds
    for one in curves[1:]:
        rounds = np.intersect1d(rounds, one.rounds)
    places = [np.searchsorted(one.rounds, rounds) for one in curves]
    values = np.stack([one.values[at] for one, at in zip(curves, places, strict=True)])
    sent = np.mean([one.bytes[at] for one, at in zip(curves, places, strict=True)], axis=0)
    timed = [one.seconds[at] for one, at in zip(curves, places, strict=True) if one.seconds is not None]
    seconds = np.mean(timed, axis=0) if len(timed) == len(curves) else None
    mean, spread = mean_over_seeds(values)
    clients = np.min([one.clients[at] for one, at in zip(curves, places, strict=True)], axis=0)
    return Curve(rounds, mean, spread, sent, seconds, clients)


def _clients(lines: Lines) -> str:
    """Returns how many clients the means are over, in words."""
    counts = np.concatenate([one.clients for _, one in lines])
    low, high = int(counts.min()), int(counts.max())
    return f"{high} clients" if low == high else f"{low} to {high} clients"


def _shown(name: str, title: str, what: str, metric: Metric, lines: Lines, over: Over) -> Drawing | Table:
    if all(len(one.rounds) == 1 for _, one in lines):
        return _numbers(name, f"{title}, a single evaluation. {what}", metric, lines, over)
    return _drawing(name, title, f"{what} {_AXES} {_at_the_end(lines, metric)}", metric, lines, over)


def _numbers(name: str, caption: str, metric: Metric, lines: Lines, over: Over) -> Table:
    headings = ("after round", metric.heading, f"+- {over}", "clients", "MB sent", "wall time (s)")
    nan = float("nan")
    rows = [
        [
            Cell(label),
            number(int(one.rounds[0]), 0),
            metric_cell(float(one.values[0]), metric),
            metric_cell(float(one.spread[0]), metric),
            number(int(one.clients[0]), 0),
            number(float(one.bytes[0]) / 1e6, 3),
            number(nan if one.seconds is None else float(one.seconds[0]), 1),
        ]
        for label, one in lines
    ]
    first = "model" if over == "clients" else "method"
    columns = [Column(first, numeric=False), *(Column(heading) for heading in headings)]
    return Table(f"{name}-table", caption, columns, rows)


def _drawing(name: str, title: str, caption: str, metric: Metric, lines: Lines, over: Over) -> Drawing:
    """Returns a figure; the lines' spreads are over clients, or over seeds, which are drawn as bands."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.1 + 0.17 * -(-len(lines) // 4)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    most = max(float(one.bytes.max()) for _, one in lines)
    factor, unit = unit_of_bytes(most)
    bounds, scale, series = bounds_of(metric), metric.scale, []
    for position, (text, one) in enumerate(lines):
        against = (one.rounds, one.bytes / factor, one.seconds)
        spread = scale * one.spread if over == "seeds" else None
        for axes, x in zip(panels, against, strict=True):
            if x is not None:
                draw_curve(axes, position, text, x, scale * one.values, spread, bounds)
        edges = None if spread is None or not np.isfinite(spread).any() else band(scale * one.values, spread, bounds)
        series.append(Series(text, against, scale * one.values, edges))
    headings = ("rounds completed", f"{unit} sent", "wall time (s)")
    for axes, heading in zip(panels, headings, strict=True):
        axes.set_xlabel(heading)
        axes.set_xlim(left=0)
    whole_numbers(panels[0])
    panels[0].set_ylabel(metric.axis)
    if metric.unit == "%":
        panels[0].set_ylim(top=min(1.01 * scale, panels[0].get_ylim()[1]))
    if not panels[2].lines:
        panels[2].text(0.5, 0.5, "times of some\nrounds are missing", transform=panels[2].transAxes, ha="center")
    handles, labels = panels[0].get_legend_handles_labels()
    legend_above(figure, handles, labels)
    axes_of_chart = [Axis(heading, whole=n == 0) for n, heading in enumerate(headings)]
    chart = Chart(axes_of_chart, metric.axis, metric.digits, series)
    return Drawing(name, title, caption, figure, _table(lines, over), chart)


def _table(lines: Lines, over: Over) -> pa.Table:
    lengths = [len(one.rounds) for _, one in lines]
    seconds = [np.full(len(one.rounds), np.nan) if one.seconds is None else one.seconds for _, one in lines]
    return table_of(
        {
            "line": np.repeat([label for label, _ in lines], lengths),
            "round": np.concatenate([one.rounds for _, one in lines]),
            "mean": np.concatenate([one.values for _, one in lines]),
            f"std_over_{over}": np.concatenate([one.spread for _, one in lines]),
            "clients": np.concatenate([one.clients for _, one in lines]),
            "bytes": np.concatenate([one.bytes for _, one in lines]),
            "seconds": np.concatenate(seconds),
        }
    )


def _drawn(run: Run) -> list[Metric]:
    """Returns what is drawn of a run: its task's first metric, and the loss."""
    metrics = metrics_of(run.rounds)
    return list(dict.fromkeys((metrics[0], next(metric for metric in metrics if metric.name == "loss"))))


def _file(metric: Metric) -> str:
    return metric.label.replace(" ", "-")


def _title(metric: Metric) -> str:
    return metric.label[:1].upper() + metric.label[1:]


def _at_the_end(lines: Lines, metric: Metric) -> str:
    """Returns the last values in words: what the figure says to those who do not see it."""
    parts = [f"{label} {metric.told(float(one.values[-1]))} after round {one.rounds[-1]}" for label, one in lines]
    return f"At the end: {', '.join(parts)}."
