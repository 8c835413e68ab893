"""Methods side by side: a line per method and model, mean, spread over clients and over seeds, the best marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayfl.errors import RunError
from rayfl.metrics import CLASSIFICATION
from rayfl.metrics import Metric as TaskMetric
from rayfl.report.grouping import Group, check_same_data, group_runs
from rayfl.report.rows import RowKey, compared_keys, final_rows, lacking, own_key, wall_seconds
from rayfl.report.significance import PairTest, over_clients, over_seeds
from rayfl.results.personalized import of_clients
from rayfl.results.schemas import metrics_of
from rayfl.runs.loading import Run


@dataclass(frozen=True)
class Metric:
    """A column of the table.

    Attributes:
        column: of ``rounds.parquet``.
        heading: for people.
        scale: what values are multiplied by.
        digits: shown behind the point.
        sign: 1 if more is better, -1 if less is.
        by_client: whether clients have it, too, so that it has a spread over them.
    """

    column: str
    heading: str
    scale: float
    digits: int
    sign: int
    by_client: bool = True

    def text(self, value: float | None) -> str:
        """A number of the column; a dash for one that is missing."""
        return "-" if value is None else f"{value:.{self.digits}f}"


METRICS = (
    Metric("top1", "accuracy %", 100, 2, 1),
    Metric("top1_worst5", "worst 5 %", 100, 2, 1, by_client=False),
    Metric("ece", "ECE", 1, 3, -1),
    Metric("loss", "loss", 1, 3, -1),
)
"""The columns of a comparison of classifiers."""


def metrics_for(runs: Sequence[Run]) -> tuple[Metric, ...]:
    """The columns of a comparison: those of the runs' task.

    Raises:
        RunError: they have different tasks.
    """
    found = list(dict.fromkeys(metrics_of(run.rounds) for run in runs))
    if len(found) > 1:
        names = "; ".join(", ".join(metric.name for metric in metrics) for metrics in found)
        raise RunError(f"the runs have different tasks, whose numbers cannot be compared: they are judged by {names}")
    metrics = found[0]
    if metrics[0] == CLASSIFICATION.first:
        further = [metric for metric in metrics if metric not in CLASSIFICATION.metrics]
        return (*METRICS, *map(_column_of, further))
    worst = replace(_column_of(metrics[0]), column=f"{metrics[0].name}_worst5", heading="worst 5 %", by_client=False)
    return (_column_of(metrics[0]), worst, *map(_column_of, metrics[1:]))


def _column_of(metric: TaskMetric) -> Metric:
    return Metric(metric.name, metric.heading, metric.scale, metric.digits, metric.sign)


@dataclass(frozen=True)
class Cell:
    """A number of the table.

    Attributes:
        mean: over seeds of a mean over clients, in units of the column.
        over_clients: population standard deviation over clients, mean over seeds; None for what clients have not.
        over_seeds: sample standard deviation over seeds; None with one seed.
        best: whether no other line has a better mean.
    """

    mean: float
    over_clients: float | None
    over_seeds: float | None
    best: bool = False


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
        evaluated: the fewest clients that a run's numbers are about.
        clients: how many clients the numbers are about, of how many, in words.
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
        """Whether it may be best: all rounds done, and not chosen on test data."""
        return self.finished and not self.key.seen_test


@dataclass(frozen=True)
class Comparison:
    """Several runs, compared.

    Attributes:
        groups: runs by configuration, without those that were never evaluated.
        lines: of the table.
        clients: tests over clients, finished groups only.
        seeds: tests over seeds, finished groups only.
        notes: what a reader should know, a sentence each.
        metrics: the columns.
    """

    groups: Sequence[Group]
    lines: Sequence[Line]
    clients: Sequence[PairTest]
    seeds: Sequence[PairTest]
    notes: Sequence[str]
    metrics: Sequence[Metric] = METRICS


def compare(runs: Sequence[Run]) -> Comparison:
    """Compares runs.

    Raises:
        RunError: they were made on different data, two are the same experiment, or none was evaluated yet.
    """
    check_same_data(runs)
    evaluated = [run for run in runs if final_rows(run)]
    notes = [
        f"{run.uri} is left out: its clients were never evaluated on test data ({run.rounds_completed} of "
        f"{run.total_rounds} rounds are done)"
        for run in runs
        if not final_rows(run)
    ]
    if not evaluated:
        raise RunError(f"there is nothing to compare yet: {'; '.join(notes)}")
    notes += [
        f"{run.uri} is unfinished, {run.rounds_completed} of {run.total_rounds} rounds are done: it is shown after its "
        "last evaluation, but is in no test, joins no other seed, and is never the best"
        for run in evaluated
        if not run.finished
    ]
    notes += [f"{run.uri} is in no test and in no curve: {why}" for run in evaluated if (why := lacking(run))]
    notes += [f"{run.uri}: {note}" for run in runs for note in run.notes]
    groups, metrics = group_runs(evaluated), metrics_for(evaluated)
    finished = [group for group in groups if group.finished]
    clients, seeds = over_clients(finished), over_seeds(finished)
    lines = _with_best([line for group in groups for line in _lines(group, metrics)], metrics)
    notes += _partners(finished, clients)
    return Comparison(groups, lines, clients, seeds, notes, metrics)


def _partners(groups: Sequence[Group], tests: Sequence[PairTest]) -> list[str]:
    paired = {label for test in tests for label in (test.first, test.second)}
    # What lacks the row itself is told apart.
    lonely = [group.label for group in groups if group.label not in paired and not any(map(lacking, group.runs))]
    if len(groups) < 2 or not lonely:
        return []
    return [f"no test with {', '.join(lonely)}: no other method was run with the same seed on the same clients"]


def _lines(group: Group, metrics: Sequence[Metric]) -> list[Line]:
    keys = dict.fromkeys(key for run in group.runs for key in compared_keys(run))
    return [_line(group, key, metrics) for key in keys]


def _line(group: Group, key: RowKey, metrics: Sequence[Metric]) -> Line:
    runs = [run for run in group.runs if key in final_rows(run)]
    rows = [final_rows(run)[key] for run in runs]
    seconds = [wall_seconds(run) for run in runs]
    choices = dict.fromkeys(row["choice"] for row in rows if row["choice"])
    model = key.label
    if choices:
        prefix = key.model.removesuffix("best")
        values = ", ".join(choice.removeprefix(prefix) for choice in choices)
        model = f"{prefix}{values} by {key.selected_on}{' *' if key.seen_test else ''}"
    return Line(
        method=group.label,
        model=model,
        key=key,
        own=any(own_key(run) == key for run in runs),
        finished=group.finished,
        seeds=len(runs),
        evaluated=min(int(row["clients"]) for row in rows),
        clients=", ".join(
            dict.fromkeys(of_clients(row["clients"], run.num_clients) for row, run in zip(rows, runs, strict=True))
        ),
        rounds=int(rows[0]["round"]),
        cells={metric.column: _cell(rows, metric) for metric in metrics},
        gigabytes=float(np.mean([row["bytes_down"] + row["bytes_up"] for row in rows])) / 1e9,
        seconds=None if None in seconds else float(np.mean([value for value in seconds if value is not None])),
    )


def _cell(rows: Sequence[dict[str, float]], metric: Metric) -> Cell:
    values = metric.scale * np.array([row[metric.column] for row in rows], dtype=float)
    spreads = [row[f"{metric.column}_std"] for row in rows] if metric.by_client else []
    spreads = [spread for spread in spreads if spread is not None]
    return Cell(
        float(values.mean()),
        metric.scale * float(np.mean(spreads)) if spreads else None,
        float(values.std(ddof=1)) if len(values) > 1 else None,
    )


def _with_best(lines: Sequence[Line], metrics: Sequence[Metric]) -> list[Line]:
    """Marks the best of each column, if there is a choice between at least two methods."""
    eligible = [line for line in lines if line.eligible]
    if len({line.method for line in eligible}) < 2:
        return list(lines)
    best = {}
    for metric in metrics:
        values = [metric.sign * line.cells[metric.column].mean for line in eligible]
        finite = [value for value in values if np.isfinite(value)]
        best[metric.column] = max(finite) if finite else None

    def marked(line: Line) -> Line:
        cells = {
            metric.column: replace(cell, best=line.eligible and metric.sign * cell.mean == best[metric.column])
            for metric in metrics
            for cell in [line.cells[metric.column]]
        }
        return replace(line, cells=cells)

    return [marked(line) for line in lines]
