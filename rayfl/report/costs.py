"""What runs took: operations, seconds of clients, memory, states, bytes sent; and what was reached by each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table as TerminalTable

from rayfl.plots.style import draw_curve
from rayfl.report.blocks import Block, Cell, Column, Figure, Paragraph, Table
from rayfl.report.drawing import Drawing, legend_above, table_of
from rayfl.report.grouping import Group
from rayfl.report.harm import Over
from rayfl.report.rows import RowKey, curve, shown_key
from rayfl.results.schemas import first_metric
from rayfl.runs.loading import Run

_DIGITS = 4
"""Of a cost."""
_WIDTH = 9.6


@dataclass(frozen=True)
class Cost:
    """A cost that a run has.

    Attributes:
        name: of the field in CSV and JSON, in its own unit.
        heading: of the column, in the unit that is shown.
        scale: what values are multiplied by where they are shown.
        until: the cost until each of some rounds, which a figure has on its axis; None: known of whole runs alone.
        whole: the cost of a run; None where it is not known.
    """

    name: str
    heading: str
    scale: float
    whole: Callable[[Run], float | None]
    until: Callable[[Run, np.ndarray], np.ndarray | None] | None = None


def _summed(name: str) -> Callable[[Run, np.ndarray], np.ndarray | None]:
    """The sum of a number of all rounds until some of them; None where a round lacks it."""

    def until(run: Run, rounds: np.ndarray) -> np.ndarray | None:
        known = {int(line["round"]): line[name] for line in run.costs if name in line}
        last = int(rounds.max()) if len(rounds) else 0
        if not last or any(round not in known for round in range(1, last + 1)):
            return None
        sums = np.cumsum([known[round] for round in range(1, last + 1)])
        found: np.ndarray = sums[rounds.astype(int) - 1]
        return found

    return until


def _total(name: str) -> Callable[[Run], float | None]:
    def whole(run: Run) -> float | None:
        found = _summed(name)(run, np.array([run.rounds_completed]))
        return None if found is None else float(found[0])

    return whole


def _has_gap(run: Run) -> bool:
    """Returns whether client seconds of some rounds are known, and of others not."""
    return any("client_seconds" in line for line in run.costs) and _total("client_seconds")(run) is None


def _largest(run: Run) -> float | None:
    return max((line["peak_bytes"] for line in run.costs if "peak_bytes" in line), default=None)


def _state(run: Run) -> float | None:
    # Older runs have "state_bytes", of files that also hold states which later ones have replaced.
    known = [line for line in run.costs if "state_mean_bytes" in line or line.get("states") == 0]
    return known[-1].get("state_mean_bytes", 0.0) if known else None


def _sent(run: Run, rounds: np.ndarray) -> np.ndarray | None:
    key = shown_key(run)
    made = None if key is None else curve(run, key, first_metric(run.rounds).name)
    return None if made is None or len(made.rounds) != len(rounds) else made.bytes


def _sent_at_last(run: Run) -> float | None:
    table = run.rounds.select(["bytes_down", "bytes_up"]).to_pylist()
    return max((float((row["bytes_down"] or 0) + (row["bytes_up"] or 0)) for row in table), default=None)


COSTS = (
    Cost("flops", "operations (GFLOP)", 1e-9, _total("flops"), _summed("flops")),
    Cost("client_seconds", "client seconds", 1.0, _total("client_seconds"), _summed("client_seconds")),
    Cost("peak_bytes", "peak memory (MB)", 1e-6, _largest),
    Cost("state_bytes", "state a client (kB)", 1e-3, _state),
    Cost("bytes_sent", "sent (MB)", 1e-6, _sent_at_last, _sent),
)


@dataclass(frozen=True)
class CostLine:
    """What the runs of a method took.

    Attributes:
        method: label of its group.
        seeds: how many runs.
        costs: by name of the cost, over seeds; None where a run does not know it.
    """

    method: str
    seeds: int
    costs: Mapping[str, Over | None]


def found(groups: Sequence[Group], keys: Mapping[str, Sequence[RowKey]]) -> tuple[list[CostLine], list[str]]:
    """Returns what the runs of each group took.

    Args:
        groups: the methods.
        keys: as for :func:`rayfl.report.harm.found`; costs are of runs, whatever their rows.

    Returns:
        The lines, and what a reader should know, a sentence each.
    """
    lines = []
    for group in groups:
        values = {cost.name: [cost.whole(run) for run in group.runs] for cost in COSTS}
        whole = {name: [v for v in known if v is not None] for name, known in values.items()}
        costs = {name: Over.of(known) if len(known) == len(group.runs) else None for name, known in whole.items()}
        lines.append(CostLine(group.label, len(group.runs), costs))
    notes = []
    if any(line.costs["flops"] is None for line in lines):
        notes.append("Operations are those of runs with tracking.flops=true; of others they are not known.")
    cut = [run.name for group in groups for run in group.runs if _has_gap(run)]
    if cut:
        notes.append(
            f"Client seconds of {', '.join(cut)} are not known: costs.jsonl lacks rounds (older rayfl lost the line of "
            "a round when it was killed after that round's commit)."
        )
    return lines, notes


def as_rows(lines: Sequence[CostLine]) -> list[dict[str, Any]]:
    """The lines as plain data: operations, seconds and bytes."""
    rows = []
    for line in lines:
        row: dict[str, Any] = {"method": line.method, "seeds": line.seeds}
        for name, over in line.costs.items():
            row |= {name: over and over.mean, f"{name}_std_over_seeds": over and over.std}
        rows.append(row)
    return rows


CAPTION = (
    "What the runs took, without training after the last round (fine-tuning). Operations: of local steps, counted "
    "once for each shape of a step by PyTorch's counter (products of matrices, convolutions, attention). Client "
    "seconds: measured, of processors or GPUs, in the clients' procedures of all rounds, without evaluation. Peak "
    "memory: the most that an actor's process, on a GPU its allocator, has had. State a client: on storage, mean "
    "over the states of the last commit; not known of older runs. Sent: messages down and up, counted. With several "
    "seeds: mean, and sample standard deviation over seeds."
)


def terminal_table(groups: Sequence[Group], lines: Sequence[CostLine]) -> TerminalTable:
    """The lines for a terminal."""
    table = TerminalTable(caption=CAPTION, caption_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", overflow="fold")
    for cost in COSTS:
        table.add_column(cost.heading, justify="right")
    for line in lines:
        table.add_row(line.method, *(cell_of(line.costs[cost.name], cost).text for cost in COSTS))
    return table


def section(groups: Sequence[Group]) -> list[Block]:
    """The table and the figure on a page; nothing of runs from before costs were noted."""
    if not any(run.costs for group in groups for run in group.runs):
        return []
    lines, notes = found(groups, {})
    drawn = drawing(groups)
    return [table(groups, lines), *([] if drawn is None else [Figure(drawn)]), *map(Paragraph, notes)]


def table(groups: Sequence[Group], lines: Sequence[CostLine]) -> Table:
    """The lines for a page and a paper."""
    return Table(
        "costs-table",
        CAPTION,
        [Column("method", numeric=False), *(Column(cost.heading) for cost in COSTS)],
        [[Cell(line.method), *(cell_of(line.costs[cost.name], cost) for cost in COSTS)] for line in lines],
    )


def drawing(groups: Sequence[Group]) -> Drawing | None:
    """The first metric of each run's shown model over each cost; None where nothing was measured."""
    from matplotlib.figure import Figure as Picture

    run = groups[0].runs[0]
    first = first_metric(run.rounds)
    points = [point for group in groups for run in group.runs for point in _points(group.label, run, first.name)]
    shown = [cost for cost in COSTS if any(point["cost"] == cost.name for point in points)]
    if not shown:
        return None
    columns = min(len(shown), 3)
    lines = -(-len(shown) // columns)
    figure = Picture(figsize=(_WIDTH, 2.7 * lines + 0.5), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    labels = [group.label for group in groups]
    for panel, cost in zip(panels, shown, strict=False):
        for point in (point for point in points if point["cost"] == cost.name):
            place = labels.index(point["method"])
            xs, ys = cost.scale * np.array(point["x"]), first.scale * np.array(point["y"])
            known = {line.get_label() for line in panel.get_lines()}
            name = "_" if point["method"] in known else point["method"]
            draw_curve(panel, place, name, xs, ys)
        panel.set(xlabel=cost.heading, ylabel=first.heading)
    # A cost that only some runs know has no line of the others.
    legends = [panel.get_legend_handles_labels() for panel in panels]
    drawn = {name: handle for handles, names in legends for handle, name in zip(handles, names, strict=True)}
    shown_labels = [label for label in labels if label in drawn]
    legend_above(figure, [drawn[label] for label in shown_labels], shown_labels)
    caption = (
        f"{first.heading} on {run.measured.split} samples, mean over {run.measured.whose}, over what it took until "
        "then; one line for each run. Peak memory and states are of whole runs: one point, after the last evaluation."
    )
    flat = [
        {"method": p["method"], "seed": p["seed"], "cost": p["cost"], "value": x, first.name: y}
        for p in points
        for x, y in zip(p["x"], p["y"], strict=True)
    ]
    data = table_of({name: [row[name] for row in flat] for name in flat[0]})
    return Drawing("costs", f"{first.label.capitalize()} over costs", caption, figure, data)


def _points(label: str, run: Run, metric: str) -> list[dict[str, Any]]:
    key = shown_key(run)
    made = None if key is None else curve(run, key, metric)
    if made is None:
        return []
    result = []
    for cost in COSTS:
        if cost.until is not None:
            x, y = cost.until(run, made.rounds), made.values
        else:
            whole = cost.whole(run)
            x, y = (None if whole is None else np.array([whole])), made.values[-1:]
        if x is not None:
            about = {"method": label, "seed": run.seed, "cost": cost.name}
            result.append({**about, "x": x.tolist(), "y": y.tolist()})
    return result


def cell_of(over: Over | None, cost: Cost) -> Cell:
    """Returns a cost over seeds, in the unit that is shown; a dash where it is not known."""
    if over is None:
        return Cell("-", float("inf"))
    mean, std = cost.scale * over.mean, None if over.std is None else cost.scale * over.std
    return Cell(_shown(mean) if std is None else _with_spread(mean, std), mean)


def _shown(value: float) -> str:
    """Returns a number with four digits, and all of those in front of its point."""
    return f"{value:,.0f}" if round(value) >= 10 ** (_DIGITS - 1) else f"{value:,.{_DIGITS}g}"


def _with_spread(mean: float, std: float) -> str:
    """Returns both; the spread ends at the digit at which the mean ends."""
    first = math.floor(math.log10(mean)) if mean > 0 else 0
    places = max(_DIGITS - 1 - first, 0)
    return f"{mean:,.{places}f} +- {std:,.{places}f}"
