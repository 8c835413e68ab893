"""Who is harmed: how many clients a model serves worse than the global model or local training, and quantiles.

Pairs are made by client: the same client, with the same samples, under two models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table as TerminalTable

from rayfl.metrics import Metric
from rayfl.report.blocks import Block, Cell, Column, Paragraph, Table
from rayfl.report.grouping import Group
from rayfl.report.rows import RowKey, client_rows, compared_keys
from rayfl.results.schemas import first_metric
from rayfl.runs.loading import Run

QUANTILES = (5, 25, 50, 75, 95)
"""In percent of the clients."""

REFERENCES = ("global", "local")
_LOCAL = "local"
"""The method whose personalized model is local training."""


@dataclass(frozen=True)
class Over:
    """A number over seeds: its mean, and its sample standard deviation; None of one seed, and of an infinite mean."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Over | None:
        """Returns the number of some runs; None without any."""
        if not values:
            return None
        mean = float(np.mean(values))
        return cls(mean, float(np.std(values, ddof=1)) if len(values) > 1 and np.isfinite(mean) else None)


@dataclass(frozen=True)
class Harm:
    """How a model of a method serves the clients.

    Attributes:
        method: label of its group.
        model: of the row.
        seeds: how many runs have the row.
        clients: the fewest clients that the numbers of a run are about.
        below: by reference (``global``, ``local``), the share of clients for which the model is worse than it; None
            where there is no such model to compare with, or it is that model.
        quantiles: by percent, the metric's quantile over clients.
    """

    method: str
    model: str
    seeds: int
    clients: int
    below: Mapping[str, Over | None]
    quantiles: Mapping[int, Over]


def found(groups: Sequence[Group], keys: Mapping[str, Sequence[RowKey]]) -> tuple[list[Harm], list[str]]:
    """Returns who is harmed, by group and model, in the task's first metric after the last evaluation.

    Local training is a run of the method ``local`` among the runs of the groups, with the same seed and the same
    samples by client. A client counts as below where its number is strictly worse.

    Args:
        groups: the methods.
        keys: by label of the group, the rows that are looked at.

    Returns:
        The lines, and what a reader should know, a sentence each.
    """
    references, notes = _local_runs(groups)
    lines = []
    for group in groups:
        for key in keys.get(group.label, ()):
            those = [(run, values) for run in group.runs if (values := _values(run, key))]
            if those:
                lines.append(_line(group.label, key, those, references))
    if lines and not references:
        notes.append("No run of the method local with the same data and seed: nobody is compared with local training.")
    return lines, notes


def _line(
    label: str, key: RowKey, found: Sequence[tuple[Run, dict[int, float]]], references: Mapping[tuple[str, int], Run]
) -> Harm:
    shares: dict[str, list[float]] = {name: [] for name in REFERENCES}
    for run, values in found:
        sign = first_metric(run.rounds).sign
        others: dict[str, dict[int, float]] = {}
        if key != RowKey("global"):
            others["global"] = _values(run, RowKey("global"))
        alone = references.get((run.partition_hash, run.seed))
        if alone is not None and run.method != _LOCAL:
            others["local"] = _values(alone, RowKey(alone.own.model))
        for name, other in others.items():
            pairs = [(values[client], other[client]) for client in values if client in other]
            if pairs:
                shares[name].append(float(np.mean([sign * mine < sign * theirs for mine, theirs in pairs])))
    quantiles = [_quantiles(list(values.values())) for _, values in found]
    return Harm(
        label,
        key.label,
        len(found),
        min(len(values) for _, values in found),
        {name: Over.of(shares[name]) if len(shares[name]) == len(found) else None for name in REFERENCES},
        {q: over for place, q in enumerate(QUANTILES) if (over := Over.of([float(one[place]) for one in quantiles]))},
    )


def _quantiles(values: Sequence[float]) -> np.ndarray:
    """Returns quantiles between neighbouring values, infinite beside an infinite one."""
    with np.errstate(invalid="ignore"):  # between an infinite value and its neighbour
        found = np.percentile(values, QUANTILES)
    below, above = (np.percentile(values, QUANTILES, method=method) for method in ("lower", "higher"))
    exact: np.ndarray = np.where(np.isnan(found), np.where(np.isinf(below), below, above), found)
    return exact


def _local_runs(groups: Sequence[Group]) -> tuple[dict[tuple[str, int], Run], list[str]]:
    """Finished runs of local training by partition and seed; where there are several, none of them is taken."""
    found: dict[tuple[str, int], list[Run]] = {}
    for group in groups:
        for run in group.runs:
            if run.method == _LOCAL and run.finished and run.partition_hash:
                found.setdefault((run.partition_hash, run.seed), []).append(run)
    several = [runs for runs in found.values() if len(runs) > 1]
    notes = [
        f"{' and '.join(run.name for run in runs)} are several runs of local training on the same data and seed: "
        "nobody is compared with them; leave all but one out"
        for runs in several
    ]
    return {key: runs[0] for key, runs in found.items() if len(runs) == 1}, notes


def _values(run: Run, key: RowKey) -> dict[int, float]:
    """The task's first metric by client, where it is defined; empty without such a row."""
    rows = client_rows(run, key) if key in compared_keys(run) else None
    if rows is None:
        return {}
    pairs = zip(rows["client"].to_pylist(), rows[first_metric(run.rounds).name].to_pylist(), strict=True)
    return {client: float(value) for client, value in pairs if value is not None}


def section(groups: Sequence[Group], keys: Mapping[str, Sequence[RowKey]]) -> list[Block]:
    """The table on a page, with what a reader should know; nothing where no client was evaluated."""
    lines, notes = found(groups, keys)
    return [table(groups, lines), *map(Paragraph, notes)] if lines else []


def as_rows(lines: Sequence[Harm]) -> list[dict[str, Any]]:
    """The lines as plain data, a number in a field of its own, in the metric's own unit."""
    rows = []
    for line in lines:
        row: dict[str, Any] = {"method": line.method, "model": line.model, "seeds": line.seeds, "clients": line.clients}
        numbers = {f"below_{name}": line.below[name] for name in REFERENCES}
        numbers |= {f"q{q:02d}": line.quantiles[q] for q in QUANTILES}
        for name, over in numbers.items():
            row |= {name: over and over.mean, f"{name}_std_over_seeds": over and over.std}
        rows.append(row)
    return rows


def caption(groups: Sequence[Group]) -> str:
    """Returns what the table shows, and how it was computed."""
    run = groups[0].runs[0]
    first = first_metric(run.rounds)
    return (
        f"Who is harmed: {run.measured.split} {first.label} of {run.measured.whose}{run.measured.when} after the last "
        "evaluation. Below global, below local: share of clients for which the model is strictly worse than the same "
        "run's global model, or than local training (a run of the method local with the same data and seed), paired by "
        f"client. Then quantiles of {first.heading} over clients. With several seeds: mean, and sample "
        "standard deviation over seeds."
    )


def table(groups: Sequence[Group], lines: Sequence[Harm]) -> Table:
    """The lines for a page and a paper."""
    first = first_metric(groups[0].runs[0].rounds)
    heads = [*(f"below {name}, %" for name in REFERENCES), *(_heading(q) for q in QUANTILES)]
    return Table(
        "harm-table",
        caption(groups),
        [Column("method", numeric=False), Column("model", numeric=False), Column("clients"), *map(Column, heads)],
        [
            [Cell(line.method), Cell(line.model), Cell(str(line.clients), line.clients), *_cells(line, first)]
            for line in lines
        ],
    )


def terminal_table(groups: Sequence[Group], lines: Sequence[Harm]) -> TerminalTable:
    """The lines for a terminal."""
    first = first_metric(groups[0].runs[0].rounds)
    table = TerminalTable(
        caption=caption(groups), caption_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1)
    )
    table.add_column("method\nmodel", overflow="fold")
    for heading in (*(f"below\n{name} %" for name in REFERENCES), *(_heading(q) for q in QUANTILES)):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        cells = [cell.text.replace(" +- ", "\n+-") for cell in _cells(line, first)]
        table.add_row(f"{line.method}\n{line.model}", *cells)
    return table


def _heading(quantile: int) -> str:
    return "median" if quantile == 50 else f"{quantile} %"


def _cells(line: Harm, metric: Metric) -> list[Cell]:
    shares = [_cell(line.below[name], 100.0, 1) for name in REFERENCES]
    # A place less than means have: five quantiles with their spreads lie side by side.
    return [*shares, *(_cell(line.quantiles[q], metric.scale, max(1, metric.digits - 1)) for q in QUANTILES)]


def _cell(over: Over | None, scale: float, digits: int) -> Cell:
    if over is None:
        return Cell("-", float("inf"))
    spread = "" if over.std is None else f" +- {scale * over.std:.{digits}f}"
    return Cell(f"{scale * over.mean:.{digits}f}{spread}", scale * over.mean)
