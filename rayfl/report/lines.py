"""The lines of a comparison: one for each method and model, with its numbers and the best of each column marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayfl.metrics import comparable
from rayfl.report.columns import Metric
from rayfl.report.grouping import Group
from rayfl.report.rows import (
    RowKey,
    best_rounds,
    compared_keys,
    covered,
    final_by_key,
    own_key,
    wall_seconds,
)
from rayfl.results.personalized import of_clients
from rayfl.runs.curves import mean_over_seeds
from rayfl.runs.loading import Run
from rayfl.runs.rows import PERSONALIZED, row_label


@dataclass(frozen=True)
class Wanted:
    """The rows and columns that are compared.

    Attributes:
        metrics: the columns; the first is the one that is tested. Empty: those of the runs' task.
        models: rows of the tables; ``personalized`` stands for each method's own. Empty: all but the members of sweeps.
    """

    metrics: Sequence[Metric] = ()
    models: Sequence[str] = ()

    def takes(self, key: RowKey, own: RowKey | None) -> bool:
        """Returns whether a row is shown, given that of its method's personalized model."""
        return key.model in self.models or (PERSONALIZED in self.models and key == own)


DEFAULT = Wanted()


@dataclass(frozen=True)
class Cell:
    """A number of the table.

    Attributes:
        mean: over seeds of a mean over clients, in units of the column.
        over_clients: population standard deviation over clients, mean over seeds; None for what clients have not.
        over_seeds: sample standard deviation over seeds; None with one seed.
        clients: the fewest that a run's mean is over; None where that is not known.
        best: whether no other line has a better mean.
        second: whether only the best lines have a better mean.
    """

    mean: float
    over_clients: float | None
    over_seeds: float | None
    clients: int | None
    best: bool = False
    second: bool = False


@dataclass(frozen=True)
class Line:
    """A method's model.

    Attributes:
        method: label of the group.
        model: of the row; says what chose it among a sweep.
        key: of the row.
        own: whether it is the method's personalized model.
        finished: whether the runs are.
        seeds: how many runs have the row.
        evaluated: the fewest clients with samples that a run has; a metric that is undefined for some is over fewer.
        clients: how many clients with samples there are, of how many, in words.
        rounds: rounds after which the first was evaluated.
        cells: by column.
        gigabytes: sent down and up, mean over runs.
        seconds: wall time, mean over runs; None where times are missing.
    """

    method: str
    model: str
    key: RowKey
    own: bool
    finished: bool
    seeds: int
    evaluated: int
    clients: str
    rounds: int
    cells: dict[str, Cell]
    gigabytes: float
    seconds: float | None

    @property
    def eligible(self) -> bool:
        """Returns whether it may be best: all rounds done, and not chosen on test data."""
        return self.finished and not self.key.seen_test


def lines_of(group: Group, wanted: Wanted) -> list[Line]:
    keys = dict.fromkeys(
        key
        for run in group.runs
        for key in (final_by_key(run) if wanted.models else compared_keys(run))
        if not wanted.models or wanted.takes(key, own_key(run))
    )
    return [_line(group, key, wanted.metrics) for key in keys]


def _line(group: Group, key: RowKey, metrics: Sequence[Metric]) -> Line:
    runs = [run for run in group.runs if key in final_by_key(run)]
    rows = [{**final_by_key(run)[key], **_chosen(run, key, metrics)} for run in runs]
    seconds = [wall_seconds(run) for run in runs]
    choices = dict.fromkeys(row["choice"] for row in rows if row["choice"])
    prefix = key.model.removesuffix("best")
    chosen = ", ".join(choice if n == 0 else choice.removeprefix(prefix) for n, choice in enumerate(choices))
    return Line(
        method=group.label,
        model=row_label(*key, chosen),
        key=key,
        own=any(own_key(run) == key for run in runs),
        finished=group.finished,
        seeds=len(runs),
        evaluated=min(int(row["clients"]) for row in rows),
        clients=", ".join(
            dict.fromkeys(of_clients(row["clients"], run.measured_clients) for row, run in zip(rows, runs, strict=True))
        ),
        rounds=int(rows[0]["round"]),
        cells={
            metric.column: _cell(rows, metric, [covered(run, key, metric.column) for run in runs]) for metric in metrics
        },
        gigabytes=float(np.mean([row["bytes_down"] + row["bytes_up"] for row in rows])) / 1e9,
        seconds=None if None in seconds else float(np.mean([value for value in seconds if value is not None])),
    )


def _chosen(run: Run, key: RowKey, metrics: Sequence[Metric]) -> dict[str, float]:
    """The values of the best round, where a column is about them."""
    return best_rounds(run, key) if any(metric.chosen for metric in metrics) else {}


def _cell(rows: Sequence[dict[str, float]], metric: Metric, clients: Sequence[int | None]) -> Cell:
    mean, spread = mean_over_seeds(metric.scale * np.array([row[metric.column] for row in rows], dtype=float))
    spreads = [row[f"{metric.column}_std"] for row in rows] if metric.by_client else []
    spreads = [spread for spread in spreads if spread is not None]
    return Cell(
        float(mean),
        metric.scale * float(np.mean(spreads)) if spreads else None,
        float(spread) if len(rows) > 1 else None,
        None if None in clients else min(count for count in clients if count is not None),
    )


def undefined(lines: Sequence[Line], metrics: Sequence[Metric]) -> list[str]:
    """Returns which means are over fewer clients than have samples, a sentence for each metric."""
    uneven = [metric.column for metric in metrics if _uneven(lines, metric)]
    notes = []
    for metric in metrics:
        found = {
            of_clients(count, line.evaluated): None
            for line in lines
            if (count := line.cells[metric.column].clients) is not None and count < line.evaluated
        }
        if metric.by_client and found:
            label = metric.heading.removesuffix(" %")
            note = f"{label}: over {' or '.join(found)} clients, for the others it is undefined"
            notes.append(f"{note}; no number of the column is the best" if metric.column in uneven else note)
    return notes


def _uneven(lines: Sequence[Line], metric: Metric) -> bool:
    """Returns whether a metric is undefined for more clients of one line than of another: the means are of others."""
    cells = [(line.cells[metric.column].clients, line.evaluated) for line in lines if line.eligible]
    lacking = {evaluated - count for count, evaluated in cells if count is not None}
    return metric.by_client and len(lacking) > 1


def with_best(lines: Sequence[Line], metrics: Sequence[Metric]) -> list[Line]:
    """Marks the best and the second of each column, if there is a choice between at least two methods."""
    eligible = [line for line in lines if line.eligible]
    if len({line.method for line in eligible}) < 2:
        return list(lines)

    def rank(line: Line, metric: Metric) -> float:
        return comparable(metric.sign * line.cells[metric.column].mean)

    order = {}
    for metric in metrics:
        told = metric.comparable and not _uneven(lines, metric)
        values = {rank(line, metric) for line in eligible} if told else set()
        found = sorted((value for value in values if np.isfinite(value)), reverse=True)
        order[metric.column] = found[:2] if len(values) > 1 else []  # no line is the best where all are equal

    def marked(line: Line) -> Line:
        cells = {}
        for metric in metrics:
            places = [line.eligible and rank(line, metric) == value for value in order[metric.column]]
            cells[metric.column] = replace(
                line.cells[metric.column], best=places[:1] == [True], second=places[1:] == [True]
            )
        return replace(line, cells=cells)

    return [marked(line) for line in lines]
