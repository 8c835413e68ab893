"""Figures of progress: a metric against rounds, bytes and wall time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from rayfl.report.drawing import DASHES, MARKERS, SERIES, Drawing, table_of
from rayfl.report.grouping import Group, shown_model
from rayfl.report.rows import Curve, curve, evaluated, main_keys, shown_key
from rayfl.results.schemas import metrics_of
from rayfl.runs.loading import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_METRICS = {"top1": ("accuracy", "accuracy %", 100.0), "loss": ("loss", "loss (nats)", 1.0)}
"""Of classification: what is drawn, its axis and its factor."""
_MOST_MARKED = 40
"""Longer curves have no markers."""
_AXES = "Left: by round; middle: by bytes sent, down and up, of all clients; right: by wall time, evaluation included."

Lines = Sequence[tuple[str, Curve]]


def progress_of_models(run: Run) -> list[Drawing]:
    """Accuracy and loss of a run's main models, a figure each; none where nothing was measured."""
    everybody, after = run.measured.cohort != "selected", run.measured.phase == "trained"
    who = evaluated(run) if everybody else f"the round's cohort{', right after its local training' if after else ''}"
    drawings = []
    for metric, (noun, axis, scale) in _drawn(run).items():
        found = [(key.label, curve(run, key, metric)) for key in main_keys(run)]
        lines = [(label, one) for label, one in found if one is not None]
        if lines:
            name = noun if everybody else f"cohort-{noun}"
            title = f"{_title(noun)} of {'the clients' if everybody else who}"
            at_end = _at_the_end(lines, metric, scale)
            caption = f"Mean {noun} on {run.measured.split} samples over {who}. {_AXES} {at_end}"
            drawings.append(_drawing(name, title, caption, (metric, axis, scale), lines, "clients"))
    return drawings


def progress_of_groups(groups: Sequence[Group]) -> list[Drawing]:
    """Accuracy and loss of the methods' personalized models, mean over seeds with a band of one standard deviation."""
    drawings, measured = [], groups[0].runs[0].measured
    for metric, (noun, axis, scale) in _drawn(groups[0].runs[0]).items():
        found = [(group.label, _mean_curve(group, metric)) for group in groups]
        lines = [(label, one) for label, one in found if one is not None]
        if lines:
            caption = (
                f"Mean {noun} on {measured.split} samples over {_clients(lines)}{measured.when}, of "
                f"{shown_model(groups)}. With several seeds: the mean over them, and a band of one sample standard "
                f"deviation. {_AXES} {_at_the_end(lines, metric, scale)}"
            )
            shown = (metric, axis, scale)
            drawings.append(_drawing(noun, f"{_title(noun)} of the methods", caption, shown, lines, "seeds"))
    return drawings


def _mean_curve(group: Group, metric: str) -> Curve | None:
    """Over the seeds, at the rounds that all have; the spread is over seeds, and nan with one."""
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
    spread = values.std(axis=0, ddof=1) if len(curves) > 1 else np.full(len(rounds), np.nan)
    clients = np.min([one.clients[at] for one, at in zip(curves, places, strict=True)], axis=0)
    return Curve(rounds, values.mean(axis=0), spread, sent, seconds, clients)


def _clients(lines: Lines) -> str:
    """Returns how many clients the means are over, in words."""
    counts = np.concatenate([one.clients for _, one in lines])
    low, high = int(counts.min()), int(counts.max())
    return f"{high} clients" if low == high else f"{low} to {high} clients"


def _drawing(
    name: str, title: str, caption: str, shown: tuple[str, str, float], lines: Lines, over: Literal["clients", "seeds"]
) -> Drawing:
    """A figure; the lines' spreads are over clients, or over seeds, which are drawn as bands."""
    from matplotlib.figure import Figure

    metric, label, scale = shown
    figure = Figure(figsize=(9.6, 3.1 + 0.17 * -(-len(lines) // 4)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    most = max(float(one.bytes.max()) for _, one in lines)
    factor, unit = next((f, u) for f, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")) if most >= f or f == 1)
    for number, (text, one) in enumerate(lines):
        against = (one.rounds, one.bytes / factor, one.seconds)
        for axes, x in zip(panels, against, strict=True):
            if x is not None:
                _line(axes, number, text, x, scale * one.values, scale * one.spread if over == "seeds" else None)
    for axes, heading in zip(panels, ("rounds completed", f"{unit} sent", "wall time (s)"), strict=True):
        axes.set_xlabel(heading)
        axes.set_xlim(left=0)
    panels[0].set_ylabel(label)
    if metric == "top1":
        panels[0].set_ylim(top=min(101.0, panels[0].get_ylim()[1]))
    if not panels[2].lines:
        panels[2].text(0.5, 0.5, "times of some\nrounds are missing", transform=panels[2].transAxes, ha="center")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(lines)))
    return Drawing(name, title, caption, figure, _table(lines, over))


def _line(axes: Axes, number: int, label: str, x: np.ndarray, y: np.ndarray, spread: np.ndarray | None) -> None:
    colour = SERIES[number % len(SERIES)]
    axes.plot(
        x,
        y,
        color=colour,
        linestyle=DASHES[number // len(SERIES) % len(DASHES)],
        marker=MARKERS[number % len(MARKERS)] if len(x) <= _MOST_MARKED else "",
        label=label,
    )
    if spread is not None and np.isfinite(spread).any():
        axes.fill_between(x, y - spread, y + spread, color=colour, alpha=0.18, linewidth=0)


def _table(lines: Lines, over: str) -> pa.Table:
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


def _drawn(run: Run) -> dict[str, tuple[str, str, float]]:
    """What is drawn of a run: its task's first metric, and the loss."""
    metrics = metrics_of(run.rounds)
    if metrics[0].name in _METRICS:
        return _METRICS
    chosen = (metrics[0], next(metric for metric in metrics if metric.name == "loss"))
    return {metric.name: (metric.label, metric.axis, metric.scale) for metric in chosen}


def _title(noun: str) -> str:
    return noun[:1].upper() + noun[1:]


def _at_the_end(lines: Lines, metric: str, scale: float) -> str:
    """The last values in words: what the figure says to those who do not see it."""
    unit = " %" if metric == "top1" else ""
    digits = 1 if metric == "top1" else 3
    parts = [f"{label} {scale * one.values[-1]:.{digits}f}{unit} after round {one.rounds[-1]}" for label, one in lines]
    return f"At the end: {', '.join(parts)}."
