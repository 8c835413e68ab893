"""Figures of one evaluation: how clients differ, and whether confidences can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from rayfl.metrics import NUM_BINS, Metric, summarize
from rayfl.plots.style import COLOURS, colour, dashes, draw_curve
from rayfl.report.blocks import Cell, Column, Table
from rayfl.report.cells import metric_cell
from rayfl.report.charts import Axis, Chart, Series
from rayfl.report.drawing import FAINT, Drawing, legend_above, table_of
from rayfl.report.grouping import Group
from rayfl.report.rows import RowKey, bins, client_rows, evaluated, final_by_key, shown_key
from rayfl.results.schemas import first_metric
from rayfl.runs.loading import Run

_WIDTH = 9.6


def client_distribution(run: Run, keys: Sequence[RowKey]) -> Drawing | Table | None:
    """Returns the first metric of all clients, sorted and as a histogram; None where no row has its own clients."""
    found = [(key.label, client_rows(run, key)) for key in keys]
    first = first_metric(run.rounds)
    return _distribution(
        [_ranked(label, rows, first, "{name}") for label, rows in found if rows is not None], first, run.measured.split
    )


def client_distribution_of_groups(groups: Sequence[Group]) -> Drawing | Table | None:
    """Returns the numbers of all clients with the methods' personalized models; the clients of all seeds together."""
    first, found = first_metric(groups[0].runs[0].rounds), []
    for group in groups:
        keys = [(run, shown_key(run)) for run in group.runs]
        rows = [(run.seed, client_rows(run, key)) for run, key in keys if key is not None]
        parts = [_ranked(group.label, one, first, f"{{name}}, seed {seed}") for seed, one in rows if one is not None]
        if parts:
            found.append(_together(parts, first))
    # A client of several runs has no one row that a click could open.
    found = [replace(one, clients=np.zeros(0, int)) for one in found]
    return _distribution(found, first, groups[0].runs[0].measured.split, " The clients of all seeds together.")


@dataclass(frozen=True, eq=False)
class _Ranked:
    """The clients of a line, the worst first: values, names and numbers of shape (K,), and how many have no value."""

    label: str
    values: np.ndarray
    names: np.ndarray
    clients: np.ndarray
    without: int = 0


def _ranked(label: str, rows: pa.Table, metric: Metric, named: str) -> _Ranked:
    values = np.asarray(rows[metric.name].to_numpy(zero_copy_only=False), dtype=float)
    pairs = zip(rows["client"].to_pylist(), rows["name"].to_pylist(), strict=True)
    told = [f"client {client}" if name == str(client) else f"client {client} ({name})" for client, name in pairs]
    names = np.array([named.format(name=one) for one in told], dtype=object)
    return _sorted(_Ranked(label, values, names, rows["client"].to_numpy()), metric)


def _together(parts: Sequence[_Ranked], metric: Metric) -> _Ranked:
    values, names, clients = (
        np.concatenate([getattr(one, name) for one in parts]) for name in ("values", "names", "clients")
    )
    without = sum(one.without for one in parts)
    return _sorted(_Ranked(parts[0].label, values, names, clients, without), metric)


def _sorted(one: _Ranked, metric: Metric) -> _Ranked:
    """Returns the clients with a value, the worst first: the lowest accuracies, the largest errors."""
    order = np.argsort(metric.sign * one.values, kind="stable")
    order = order[~np.isnan(one.values[order])]
    without = one.without + len(one.values) - len(order)
    return _Ranked(one.label, one.values[order], one.names[order], one.clients[order], without)


def _distribution(found: Sequence[_Ranked], metric: Metric, split: str, remark: str = "") -> Drawing | Table | None:
    from matplotlib.figure import Figure

    found = [one for one in found if len(one.values)]
    if not found:
        return None
    if all(len(one.values) == 1 for one in found):
        rows = [[Cell(one.label), Cell(str(one.names[0])), metric_cell(float(one.values[0]), metric)] for one in found]
        columns = [Column("line", numeric=False), Column("client", numeric=False), Column(metric.heading)]
        return Table(
            "clients-numbers",
            f"{split.capitalize()} {metric.label} of the one client that was evaluated.",
            columns,
            rows,
        )
    figure = Figure(figsize=(_WIDTH, 3.2 + 0.17 * -(-len(found) // 4)), layout="constrained")
    # Lines of more histograms than there are colours could not be told apart.
    left, *further = figure.subplots(1, 2 if len(found) <= len(COLOURS) else 1, squeeze=False)[0]
    of_shares, scale, heading = metric.unit == "%", metric.scale, metric.axis
    series = []
    for position, one in enumerate(found):
        share = 100 * (np.arange(len(one.values)) + 0.5) / len(one.values)
        draw_curve(left, position, one.label, share, scale * one.values)
        names, clients = list(map(str, one.names)), [int(client) for client in one.clients]
        series.append(Series(one.label, [share], scale * one.values, None, names, clients))
    left.axvspan(0, 5, color=FAINT, alpha=0.25, linewidth=0)
    left.text(5.8, 0.02, "worst 5 %", fontsize=8, transform=left.get_xaxis_transform())
    left.set(xlabel="clients, worst first (%)", ylabel=heading, xlim=(0, 100))
    if of_shares:
        left.set_ylim(0, 101)
    for right in further:
        _draw_histograms(right, found, metric)
    handles, labels = left.get_legend_handles_labels()
    legend_above(figure, handles, labels)
    words = [_in_words(one, metric) for one in found]
    column = "accuracy" if metric.name == "top1" else metric.name
    data = table_of(
        {
            "line": np.repeat([one.label for one in found], [len(one.values) for one in found]),
            "place": np.concatenate([np.arange(1, len(one.values) + 1) for one in found]),
            column: np.concatenate([one.values for one in found]),
        }
    )
    caption = (
        f"{split.capitalize()} {metric.label} of every client that was evaluated, after the last evaluation: clients "
        "sorted, the worst first. The picture has the worst 5 % shaded"
        f"{f', and on its right the share of the clients by {metric.label}' if further else ''}.{remark} "
        f"{'; '.join(words)}."
    )
    bounds = (0.0, 100.0) if of_shares else (None, None)
    chart = Chart([Axis("clients, worst first (%)")], heading, metric.digits, series, points=True, bounds=bounds)
    return Drawing(f"clients-{column}", "Distribution over clients", caption, figure, data, chart)


def _draw_histograms(axes: Any, found: Sequence[_Ranked], metric: Metric) -> None:
    of_shares, scale = metric.unit == "%", metric.scale
    edges = np.linspace(0, 100, 21) if of_shares else _edges(scale * np.concatenate([one.values for one in found]))
    for position, one in enumerate(found):
        look = {"color": colour(position), "linestyle": dashes(position)}
        heights = np.histogram(scale * one.values, edges)[0] * 100 / len(one.values)
        axes.stairs(heights, edges, linewidth=1.4, **look)
        if len(found) <= 2:
            axes.stairs(heights, edges, color=colour(position), alpha=0.18, fill=True)
    axes.set(xlabel=metric.axis, ylabel="clients (%)")
    if of_shares:
        axes.set_xlim(0, 100)


def _edges(values: np.ndarray) -> np.ndarray:
    """Returns the edges of 20 bins that cover all finite values."""
    finite = values[np.isfinite(values)]
    least, most = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    return np.linspace(least, max(most, least + 1e-9), 21)


def _in_words(one: _Ranked, metric: Metric) -> str:
    least, most = ("lowest", "highest") if metric.sign > 0 else ("highest", "lowest")
    with np.errstate(invalid="ignore"):  # the spread of infinite values, which is not asked for
        worst5 = summarize(one.values, mode=metric.mode).worst5
    middle = float(np.median(one.values))
    infinite = int(np.isinf(one.values).sum())
    apart = [
        *([f"{infinite} infinite and not in the picture"] if infinite else []),
        *([f"{one.without} more without a number"] if one.without else []),
    ]
    more = f" ({', '.join(apart)})" if apart else ""
    return (
        f"{one.label}, {len(one.values)} clients{more}: {least} {metric.told(one.values[0])}, worst 5 % "
        f"{metric.told(worst5)}, median {metric.told(middle)}, {most} {metric.told(one.values[-1])}"
    )


def reliability(run: Run, keys: Sequence[RowKey]) -> Drawing | None:
    """Returns the accuracy by confidence, a panel for each model; None for runs without recorded bins."""
    from matplotlib.figure import Figure

    found = [(key, bins(run, key)) for key in keys]
    found = [(key, rows) for key, rows in found if rows.num_rows]
    if not found:
        return None
    figure = Figure(figsize=(min(_WIDTH, 3.2 * len(found) + 1.6), 4.2), layout="constrained")
    panels = figure.subplots(2, len(found), sharex=True, sharey="row", squeeze=False, height_ratios=[3, 1])
    words = []
    for (key, rows), above, below in zip(found, *panels, strict=True):
        row = final_by_key(run)[key]
        right = rows["bin"].to_numpy() / NUM_BINS
        accuracy, confidence, n = (rows[name].to_numpy() for name in ("accuracy", "confidence", "n"))
        middle, width = right - 0.5 / NUM_BINS, 0.92 / NUM_BINS
        above.bar(middle, np.minimum(accuracy, confidence), width, color=colour(0), label="accuracy")
        over, under = np.maximum(confidence - accuracy, 0), np.maximum(accuracy - confidence, 0)
        above.bar(middle, over, width, bottom=accuracy, color=colour(1), alpha=0.6, label="confidence above it")
        above.bar(
            middle, under, width, bottom=confidence, color=colour(0), alpha=0.5, label="accuracy above confidence"
        )
        above.plot([0, 1], [0, 1], color=FAINT, linestyle="--", linewidth=1)
        below.bar(middle, 100 * n / n.sum(), width, color=FAINT)
        errors = f"ECE {_error(row['pooled_ece'])}, MCE {_error(row['pooled_mce'])}"
        above.set_title(f"{key.label}\n{errors}")
        above.set(xlim=(0, 1), ylim=(0, 1))
        below.set_xlabel("confidence")
        words.append(f"{key.label}: {errors}")
    panels[0][0].set_ylabel("accuracy")
    panels[1][0].set_ylabel("samples (%)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    data = pa.concat_tables(
        [rows.select(["model", "selected_on", "bin", "n", "confidence", "accuracy"]) for _, rows in found]
    )
    caption = (
        f"The {run.measured.split} samples of {evaluated(run)} together{run.measured.when}, in {NUM_BINS} bins of "
        "confidence: above, how many are predicted rightly, and the gap to their mean confidence (dashed: no gap); "
        "below, how many there are. ECE is the mean gap, MCE the largest. They are those of all samples together, "
        "which are not the means over clients in the "
        f"tables. {'; '.join(words)}."
    )
    return Drawing("reliability", "Reliability of confidences", caption, figure, data)


def reliability_of_groups(groups: Sequence[Group]) -> Drawing | None:
    """Returns accuracy minus confidence by confidence, a line for each method's personalized model; seeds pooled."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH * 0.72, 3.6), layout="constrained")
    axes = figure.subplots()
    tables, words, series = [], [], []
    for position, group in enumerate(groups):
        known = [(run, key) for run in group.runs if (key := shown_key(run)) is not None]
        rows = pa.concat_tables([bins(run, key) for run, key in known]) if known else None
        if rows is None or not rows.num_rows:
            continue
        n, confidence, hits = _pooled(rows)
        filled = n > 0
        gap = np.where(filled, hits - confidence, 0) / np.maximum(n, 1)
        x = confidence[filled] / n[filled]
        draw_curve(axes, position, group.label, x, gap[filled])
        series.append(Series(group.label, [x], gap[filled]))
        ece, mce = float((np.abs(gap) * n).sum() / n.sum()), float(np.abs(gap[filled]).max())
        words.append(f"{group.label}: ECE {ece:.3f}, MCE {mce:.3f}")
        numbers = np.arange(1, NUM_BINS + 1)[filled]
        line = np.repeat(group.label, len(numbers))
        tables.append(table_of({"line": line, "bin": numbers, "n": n[filled], "gap": gap[filled]}))
    if not tables:
        return None
    axes.axhline(0, color=FAINT, linestyle="--", linewidth=1)
    axes.set(xlabel="confidence", ylabel="accuracy - confidence", xlim=(0, 1))
    figure.legend(loc="outside right upper")
    caption = (
        f"{groups[0].runs[0].measured.split.capitalize()} samples of all clients and seeds together, "
        f"in {NUM_BINS} bins of confidence. Below zero: more confident than right. {'; '.join(words)}."
    )
    chart = Chart([Axis("confidence")], "accuracy - confidence", 3, series, points=True)
    return Drawing("reliability", "Reliability of confidences", caption, figure, pa.concat_tables(tables), chart)


def _pooled(rows: pa.Table) -> np.ndarray:
    """Returns samples, sum of confidences and hits by bin, shape (3, bins)."""
    places = rows["bin"].to_numpy() - 1
    n = rows["n"].to_numpy().astype(float)
    weights = (n, n * rows["confidence"].to_numpy(), n * rows["accuracy"].to_numpy())
    return np.stack([np.bincount(places, weights=one, minlength=NUM_BINS) for one in weights])


def _error(value: float | None) -> str:
    """A calibration error; there is none where a client's model gives numbers that are not finite."""
    return "-" if value is None else f"{value:.3f}"
