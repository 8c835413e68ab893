"""Ours beside the paper's: which number of a run compares with a printed one, and how far it is from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
from scipy.stats import kendalltau

from rayfl.reproduction.baseline import FINETUNED, REMARK, row_of
from rayfl.reproduction.reference import Cell, Protocol, ReferenceTable, Status
from rayfl.reproduction.scaling import scaled_window
from rayfl.reproduction.tables import PlannedRun, Reproduction
from rayfl.results.personalized import PersonalizedRows, recorded_clients
from rayfl.runs.curves import mean_over_seeds
from rayfl.runs.measured import Measured as Evaluations
from rayfl.runs.rows import summaries

_SCALES = {"percent": 100.0}


@dataclass(frozen=True)
class Measured:
    """The number of one run.

    Attributes:
        value: in the table's unit.
        std: over clients, in that unit; None where the results have none.
        clients: how many clients the number is about.
        everybody: how many there are; None where the results do not say it.
        selected_on: what the row was chosen on: nothing, validation or test data.
        choice: which one was chosen, such as ``lambda=0.5``.
        best_round: the best of all evaluations by the test data themselves, in the table's unit; None where the paper
            does not print that.
    """

    value: float
    std: float | None
    clients: int
    everybody: int | None
    selected_on: str
    choice: str
    best_round: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A cell of a table, ours and the paper's, in the table's unit.

    Attributes:
        table: name of the table.
        setting: the preset.
        method: the row.
        seeds: how many runs there are of it.
        ours: their mean; None where no run has the number yet.
        ours_std_over_clients: population standard deviation over clients, mean over seeds; None where there is none.
        ours_std_over_seeds: sample standard deviation over seeds; None for one seed.
        clients: the fewest clients that a run's number is about; None without runs.
        everybody: K; None where it is not known.
        paper: the printed mean; None in figures.
        paper_std: the printed standard deviation.
        paper_std_over: ``clients`` or ``runs``, what it is taken over; empty where the paper prints none.
        status: whether the cell is a target, one with caution, or none.
        selected_on: what the row was chosen on.
        choice: which one was chosen, of the first seed.
        remarks: what is to be known of the printed number.
        best_round: ours in the best of all evaluations, chosen by the test data themselves, mean over seeds; None where
            the paper prints no such number.
    """

    table: str
    setting: str
    method: str
    seeds: int
    ours: float | None
    ours_std_over_clients: float | None
    ours_std_over_seeds: float | None
    clients: int | None
    everybody: int | None
    paper: float | None
    paper_std: float | None
    paper_std_over: str
    status: Status
    selected_on: str
    choice: str
    remarks: tuple[str, ...]
    best_round: float | None = None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's; that of the best round where the paper prints it."""
        ours = self.ours if self.best_round is None else self.best_round
        return None if ours is None or self.paper is None else ours - self.paper

    @property
    def within(self) -> bool | None:
        """Whether the difference is at most the paper's standard deviation; None where one of them is missing."""
        return None if self.difference is None or self.paper_std is None else abs(self.difference) <= self.paper_std

    @property
    def seen_test(self) -> bool:
        """Returns whether the row was chosen on test data."""
        return "test" in self.selected_on


def compare(planned: Reproduction, results: Mapping[PlannedRun, pa.Table]) -> list[Comparison]:
    """Every cell of the tables, in their order.

    Args:
        planned: what was to be run.
        results: the summaries (``rayfl.results.schemas.ROUNDS_SCHEMA``) of the runs that are finished.
    """
    found = []
    for table in planned.tables:
        for setting in table.preset_names:
            runs: dict[str, list[PlannedRun]] = {}
            for run in planned.runs:
                if run.setting == setting and _has(planned, table, setting, run.method):
                    runs.setdefault(run.method, []).append(run)
            for method, mine in runs.items():
                values = [measured(table, run, results[run]) for run in mine if run in results]
                found.append(_compared(table, setting, method, [value for value in values if value is not None]))
    return found


def _has(planned: Reproduction, table: ReferenceTable, setting: str, method: str) -> bool:
    if method == FINETUNED:
        return (table.name, setting) in planned.finetuned
    return not table.settings or method in table.settings[setting]


def measured(table: ReferenceTable, run: PlannedRun, rounds: pa.Table) -> Measured | None:
    """The number of a run that compares with a table's; None where it was not recorded.

    Where the paper means several rounds, so do we over the rounds at the same shares of the run; if none of these was
    evaluated, the last one before them.
    """
    protocol = table.protocol
    assert protocol is not None
    rows = _rows(rounds, protocol, run)
    if not rows:
        return None
    last = max(row["round"] for row in rows)
    first = last
    if protocol.rounds != "last":
        first, last = scaled_window(protocol.rounds, run.paper_rounds, run.config.train.rounds)
        if not any(first <= row["round"] <= last for row in rows):
            first = last = max(
                (row["round"] for row in rows if row["round"] < first), default=min(r["round"] for r in rows)
            )
    chosen = [row for row in rows if first <= row["round"] <= last]
    scale = _SCALES.get(table.unit, 1.0)
    column = protocol.column(table.metric)
    spreads = [row.get(f"{column}_std") for row in chosen]
    known = [spread for spread in spreads if spread is not None]
    value = fmean(_number(row[column]) for row in chosen) * scale
    newest = chosen[-1]
    std = fmean(known) * scale if len(known) == len(chosen) else None
    clients = min(int(row["clients"]) for row in chosen)
    everybody = recorded_clients(rounds)
    best = None
    if protocol.best_round:
        values = [_number(row[column]) for row in rows]
        best = scale * (min(values) if table.metric in ("loss", "ece", "mce") else max(values))
    return Measured(value, std, clients, everybody, str(newest["selected_on"]), str(newest["choice"]), best)


def rank_agreement(rows: Sequence[Comparison]) -> float | None:
    """Kendall's tau-b between our order of a setting's methods and the paper's, without cells that are no targets.

    1: the same order; None: fewer than three methods, or all are equal.
    """
    pairs = [
        (row.ours if row.best_round is None else row.best_round, row.paper)
        for row in rows
        if row.status != "no_target" and row.difference is not None
    ]
    if len(pairs) < 3:
        return None
    tau = float(kendalltau(*zip(*pairs, strict=True)).statistic)
    return None if np.isnan(tau) else tau


def _rows(rounds: pa.Table, protocol: Protocol, run: PlannedRun) -> list[dict[str, Any]]:
    """The row that compares, of every round that has one, in their order."""
    own, named = PersonalizedRows.of(run.config.algorithm), row_of(run.setting, run.method)
    evaluations = Evaluations("test", protocol.cohort, protocol.phase)

    def found(model: str, selected_on: str = "") -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = summaries(rounds, model, selected_on, evaluations).to_pylist()
        return rows

    if protocol.row == "global" or own.sweep is None or named is not None:
        return found("global" if protocol.row == "global" else named or own.model)
    for judge in (protocol.selected_on, "validation", "test"):
        if judge and (rows := found(own.summary[0], judge)):
            return rows
    return []


def _number(value: Any) -> float:
    """A metric, or the number in a choice such as ``lambda=0.5``."""
    return float(value.rpartition("=")[2]) if isinstance(value, str) else float(value)


def _compared(table: ReferenceTable, setting: str, method: str, values: Sequence[Measured]) -> Comparison:
    cell: Cell | None = table.settings[setting].get(method) if table.settings else None
    remarks = tuple(remark.reason for remark in table.remarks_on(setting, method))
    spreads = [value.std for value in values if value.std is not None]
    paper_std = None if cell is None else cell.std
    mean, spread = map(float, mean_over_seeds([value.value for value in values])) if values else (None, None)
    best = [value.best_round for value in values if value.best_round is not None]
    return Comparison(
        table=table.name,
        setting=setting,
        method=method,
        seeds=len(values),
        ours=mean,
        ours_std_over_clients=fmean(spreads) if spreads else None,
        ours_std_over_seeds=spread if len(values) > 1 else None,
        clients=min((value.clients for value in values), default=None),
        everybody=values[0].everybody if values else None,
        paper=None if cell is None else cell.mean,
        paper_std=paper_std,
        paper_std_over="" if paper_std is None else str(table.std_over),
        status=table.status(setting, method) if cell is not None else "no_target",
        selected_on=values[0].selected_on if values else "",
        choice=values[0].choice if values else "",
        remarks=(REMARK,) if method == FINETUNED else remarks,
        best_round=fmean(best) if best else None,
    )
