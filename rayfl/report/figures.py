"""Figures of one evaluation: how clients differ, and whether confidences can be trusted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from rayfl.metrics import NUM_BINS, Metric, summarize
from rayfl.plots.style import colour, dashes
from rayfl.report.drawing import FAINT, Drawing, table_of
from rayfl.report.grouping import Group
from rayfl.report.rows import RowKey, bins, client_rows, evaluated, final_by_key, shown_key
from rayfl.results.schemas import first_metric
from rayfl.runs.loading import Run

_WIDTH = 9.6


def client_distribution(run: Run, keys: Sequence[RowKey]) -> Drawing | None:
    """Accuracies of all clients, sorted and as a histogram; None where no row has its own clients."""
    found = [(key.label, client_rows(run, key)) for key in keys]
    first = first_metric(run.rounds)
    return _distribution([(label, _values(rows, first)) for label, rows in found if rows is not None], first)


def client_distribution_of_groups(groups: Sequence[Group]) -> Drawing | None:
    """Numbers of all clients with the methods' personalized models; the clients of all seeds together."""
    found, first = [], first_metric(groups[0].runs[0].rounds)
    for group in groups:
        keys = [(run, shown_key(run)) for run in group.runs]
        rows = [client_rows(run, key) for run, key in keys if key is not None]
        values = [_values(one, first) for one in rows if one is not None]
        if values:
            found.append((group.label, np.concatenate(values)))
    return _distribution(found, first, " The clients of all seeds together.")


def _values(rows: pa.Table, metric: Metric) -> np.ndarray:
    return np.asarray(rows[metric.name].to_numpy(zero_copy_only=False), dtype=float)


def _distribution(found: Sequence[tuple[str, np.ndarray]], metric: Metric, remark: str = "") -> Drawing | None:
    from matplotlib.figure import Figure

    # The worst clients first: the lowest accuracies, the largest errors.
    found = [(label, metric.sign * np.sort(metric.sign * values[np.isfinite(values)])) for label, values in found]
    found = [(label, values) for label, values in found if len(values)]
    if not found:
        return None
    figure = Figure(figsize=(_WIDTH, 3.2 + 0.17 * -(-len(found) // 4)), layout="constrained")
    left, right = figure.subplots(1, 2)
    of_shares = metric.unit == "%"
    scale, heading = metric.scale, metric.heading
    ends = [value for _, values in found for value in (scale * values.min(), scale * values.max())]
    edges = np.linspace(0, 100, 21) if of_shares else np.linspace(min(ends), max(max(ends), min(ends) + 1e-9), 21)
    for number, (label, values) in enumerate(found):
        look = {"color": colour(number), "linestyle": dashes(number)}
        share = 100 * (np.arange(len(values)) + 0.5) / len(values)
        left.plot(share, scale * values, label=label, **look)
        heights = np.histogram(scale * values, edges)[0] * 100 / len(values)
        right.stairs(heights, edges, linewidth=1.4, **look)
        if len(found) <= 2:
            right.stairs(heights, edges, color=colour(number), alpha=0.18, fill=True)
    left.axvspan(0, 5, color=FAINT, alpha=0.25, linewidth=0)
    left.text(5.8, 0.02, "worst 5 %", fontsize=8, transform=left.get_xaxis_transform())
    left.set(xlabel="clients, worst first (%)", ylabel=heading, xlim=(0, 100))
    right.set(xlabel=heading, ylabel="clients (%)")
    if of_shares:
        left.set_ylim(0, 101)
        right.set_xlim(0, 100)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(found)))

    def told(value: float) -> str:
        return f"{scale * value:.1f} %" if of_shares else f"{scale * value:.{metric.digits}f}"

    words = [
        f"{label}, {len(v)} clients: {'lowest' if metric.sign > 0 else 'highest'} {told(v[0])}, worst 5 % "
        f"{told(summarize(v, mode=metric.mode).worst5)}, median {told(np.median(v))}, "
        f"{'highest' if metric.sign > 0 else 'lowest'} {told(v[-1])}"
        for label, v in found
    ]
    data = table_of(
        {
            "line": np.repeat([label for label, _ in found], [len(v) for _, v in found]),
            "place": np.concatenate([np.arange(1, len(v) + 1) for _, v in found]),
            ("accuracy" if metric.name == "top1" else metric.name): np.concatenate([v for _, v in found]),
        }
    )
    caption = (
        f"Test {metric.label} of every client that was evaluated, after the last evaluation. Left: clients sorted, the "
        f"worst first; the shaded part is the worst 5 %. Right: share of the clients by {metric.label}.{remark} "
        f"{'; '.join(words)}."
    )
    return Drawing(
        f"clients-{'accuracy' if metric.name == 'top1' else metric.name}",
        "Distribution over clients",
        caption,
        figure,
        data,
    )


def reliability(run: Run, keys: Sequence[RowKey]) -> Drawing | None:
    """Accuracy by confidence, a panel for each model; None for runs without recorded bins."""
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
        above.set_title(f"{key.label}\nECE {row['pooled_ece']:.3f}, MCE {row['pooled_mce']:.3f}")
        above.set(xlim=(0, 1), ylim=(0, 1))
        below.set_xlabel("confidence")
        words.append(f"{key.label}: ECE {row['pooled_ece']:.3f}, MCE {row['pooled_mce']:.3f}")
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
    """Accuracy minus confidence by confidence, a line for each method's personalized model; seeds pooled."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH * 0.72, 3.6), layout="constrained")
    axes = figure.subplots()
    tables, words = [], []
    for number, group in enumerate(groups):
        known = [(run, key) for run in group.runs if (key := shown_key(run)) is not None]
        rows = pa.concat_tables([bins(run, key) for run, key in known]) if known else None
        if rows is None or not rows.num_rows:
            continue
        n, confidence, hits = _pooled(rows)
        filled = n > 0
        gap = np.where(filled, hits - confidence, 0) / np.maximum(n, 1)
        axes.plot(
            confidence[filled] / n[filled],
            gap[filled],
            color=colour(number),
            linestyle=dashes(number),
            marker="o",
            label=group.label,
        )
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
    return Drawing("reliability", "Reliability of confidences", caption, figure, pa.concat_tables(tables))


def _pooled(rows: pa.Table) -> np.ndarray:
    """Samples, sum of confidences and hits by bin, shape (3, bins)."""
    places = rows["bin"].to_numpy() - 1
    n = rows["n"].to_numpy().astype(float)
    weights = (n, n * rows["confidence"].to_numpy(), n * rows["accuracy"].to_numpy())
    return np.stack([np.bincount(places, weights=one, minlength=NUM_BINS) for one in weights])
