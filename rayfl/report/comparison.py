"""Methods side by side: a line per method and model, mean, spread over clients and over seeds, the best marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rayfl.errors import ConfigError, RunError
from rayfl.metrics import comparable
from rayfl.naming.spelling import nearest
from rayfl.report.columns import Metric, metrics_for
from rayfl.report.grouping import Group, check_same_data, group_runs
from rayfl.report.rows import (
    RowKey,
    best_rounds,
    compared_keys,
    final_by_key,
    lacking,
    own_key,
    wall_seconds,
)
from rayfl.report.significance import PairTest, over_clients, over_seeds
from rayfl.results.personalized import FINETUNED_ROW, of_clients
from rayfl.runs.curves import mean_over_seeds
from rayfl.runs.loading import Run
from rayfl.runs.measured import Measured
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
        best: whether no other line has a better mean.
        second: whether only the best lines have a better mean.
    """

    mean: float
    over_clients: float | None
    over_seeds: float | None
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
        """Returns whether it may be best: all rounds done, and not chosen on test data."""
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
        wanted: what is compared; its metrics are the columns.
        chosen: whether the columns were chosen, or are the task's.
    """

    groups: Sequence[Group]
    lines: Sequence[Line]
    clients: Sequence[PairTest]
    seeds: Sequence[PairTest]
    notes: Sequence[str]
    wanted: Wanted
    chosen: bool = False

    @property
    def tested(self) -> Metric:
        """Returns the metric that is tested."""
        return self.wanted.metrics[0]

    @property
    def measured(self) -> Measured:
        """Returns which evaluations the numbers are of."""
        return self.groups[0].runs[0].measured


def compare(runs: Sequence[Run], wanted: Wanted = DEFAULT) -> Comparison:
    """Compares runs.

    Raises:
        RunError: they were made on different data, two are the same experiment, or none was evaluated yet.
        ConfigError: no run has a row that was asked for.
    """
    check_same_data(runs)
    runs = [run.viewed(chosen=wanted.models[0] if _one_row(wanted) else "") for run in runs]
    evaluated = [run for run in runs if final_by_key(run)]
    notes = _gathered(
        (
            run,
            f"left out, {_who(run.measured)} were never evaluated on {run.measured.split} data{run.measured.when} "
            f"({run.rounds_completed} of {run.total_rounds} rounds are done)",
        )
        for run in runs
        if not final_by_key(run)
    )
    if not evaluated:
        raise RunError(f"there is nothing to compare yet: {'; '.join(notes)}")
    notes += _gathered(
        (
            run,
            f"unfinished, {run.rounds_completed} of {run.total_rounds} rounds are done: shown after its last "
            "evaluation, but in no test, joined with no other seed, and never the best",
        )
        for run in evaluated
        if not run.finished
    )
    notes += _gathered((run, f"in no test and in no curve, {why}") for run in evaluated if (why := lacking(run)))
    notes += _gathered(
        (
            run,
            f"its clients fine-tuned the final model, but tests and curves are of its row {run.own.label!r}: "
            f"--model {FINETUNED_ROW} compares the fine-tuned models",
        )
        for run in evaluated
        if RowKey(FINETUNED_ROW, "") in final_by_key(run) and not run.chosen and run.own.model != FINETUNED_ROW
    )
    notes += _gathered((run, note) for run in runs for note in run.notes)
    chosen = bool(wanted.metrics)
    wanted = wanted if chosen else replace(wanted, metrics=metrics_for(evaluated))
    groups = group_runs(evaluated)
    finished = [group for group in groups if group.finished]
    tested = wanted.metrics[0]
    clients = over_clients(finished, tested.column) if tested.by_client else []
    seeds = [] if tested.chosen else over_seeds(finished, tested.column)
    lines = _with_best([line for group in groups for line in _lines(group, wanted)], wanted.metrics)
    if not lines:
        raise RunError(f"there is nothing to compare: {'; '.join(notes)}")
    notes += _partners(finished, clients or seeds)
    if any(metric.chosen for metric in wanted.metrics):
        notes.append(
            f"* best round: the best of all evaluations, chosen by the {runs[0].measured.split} data that the number "
            "is of, as some papers print it: not a fair estimate"
        )
    if any(line.key.selected_on.startswith("validation") for line in lines) and runs[0].measured.split == "validation":
        notes.append("rows that were chosen on validation data are shown on the same data: these numbers flatter them")
    return Comparison(groups, lines, clients, seeds, notes, wanted, chosen)


def check_models(runs: Sequence[Run], models: Sequence[str]) -> None:
    """Raises ConfigError for a row that no run has, naming those that there are."""
    found = dict.fromkeys(key.model for run in runs for key in final_by_key(run))
    for name in models:
        if found and name not in found and name != PERSONALIZED:
            raise ConfigError(
                f"--model {name}: no run has such a row{nearest(name, list(found))}; there are {PERSONALIZED}, "
                f"{', '.join(found)}"
            )


def _one_row(wanted: Wanted) -> bool:
    return len(wanted.models) == 1 and wanted.models[0] != PERSONALIZED


def _gathered(notes: Iterable[tuple[Run, str]]) -> list[str]:
    """Returns notes with the runs that they are about; equal notes are one."""
    runs: dict[str, dict[str, None]] = {}
    for run, note in notes:
        runs.setdefault(note, {})[run.uri] = None
    return [f"{', '.join(uris)}: {note}" for note, uris in runs.items()]


def _who(measured: Measured) -> str:
    return {"all": "its clients", "selected": "its cohorts", "unseen": "its held-out clients"}[measured.cohort]


def _partners(groups: Sequence[Group], tests: Sequence[PairTest]) -> list[str]:
    paired = {label for test in tests for label in (test.first, test.second)}
    # What lacks the row itself is told apart.
    lonely = [group.label for group in groups if group.label not in paired and not any(map(lacking, group.runs))]
    if len(groups) < 2 or not lonely:
        return []
    return [f"no test with {', '.join(lonely)}: no other method was run with the same seed on the same clients"]


def _lines(group: Group, wanted: Wanted) -> list[Line]:
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
        cells={metric.column: _cell(rows, metric) for metric in metrics},
        gigabytes=float(np.mean([row["bytes_down"] + row["bytes_up"] for row in rows])) / 1e9,
        seconds=None if None in seconds else float(np.mean([value for value in seconds if value is not None])),
    )


def _chosen(run: Run, key: RowKey, metrics: Sequence[Metric]) -> dict[str, float]:
    """The values of the best round, where a column is about them."""
    return best_rounds(run, key) if any(metric.chosen for metric in metrics) else {}


def _cell(rows: Sequence[dict[str, float]], metric: Metric) -> Cell:
    mean, spread = mean_over_seeds(metric.scale * np.array([row[metric.column] for row in rows], dtype=float))
    spreads = [row[f"{metric.column}_std"] for row in rows] if metric.by_client else []
    spreads = [spread for spread in spreads if spread is not None]
    return Cell(
        float(mean),
        metric.scale * float(np.mean(spreads)) if spreads else None,
        float(spread) if len(rows) > 1 else None,
    )


def _with_best(lines: Sequence[Line], metrics: Sequence[Metric]) -> list[Line]:
    """Marks the best and the second of each column, if there is a choice between at least two methods."""
    eligible = [line for line in lines if line.eligible]
    if len({line.method for line in eligible}) < 2:
        return list(lines)

    def rank(line: Line, metric: Metric) -> float:
        return comparable(metric.sign * line.cells[metric.column].mean)

    order = {}
    for metric in metrics:
        values = set() if metric.chosen else {rank(line, metric) for line in eligible}
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
