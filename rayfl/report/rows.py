"""Finds things in a run's tables: the rows that matter, the values of clients, curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfl.examples import SPLITS
from rayfl.results.personalized import of_clients
from rayfl.results.schemas import metrics_of
from rayfl.runs.loading import Run
from rayfl.runs.rows import final_rows, row_label, rows_of_clients, summaries, where
from rayfl.tracking.timings import seconds_spent


class RowKey(NamedTuple):
    """The model that a row of ``rounds.parquet`` is about, and what it was chosen on if it was chosen among a sweep."""

    model: str
    selected_on: str = ""

    @property
    def seen_test(self) -> bool:
        """Returns whether the choice has seen the test data."""
        return "test" in self.selected_on

    @property
    def label(self) -> str:
        """Returns what the row is called in legends."""
        return row_label(self.model, self.selected_on)


@dataclass(frozen=True, eq=False)
class Curve:
    """A metric of one row over a run, one point an evaluation.

    Attributes:
        rounds: completed rounds, int of shape (T,).
        values: mean over clients, shape (T,).
        spread: population standard deviation over clients, shape (T,).
        bytes: sent so far, down and up, shape (T,).
        seconds: wall time of the rounds so far, shape (T,); None where some rounds have no times.
        clients: how many clients each mean is over, int of shape (T,).
    """

    rounds: np.ndarray
    values: np.ndarray
    spread: np.ndarray
    bytes: np.ndarray
    seconds: np.ndarray | None
    clients: np.ndarray


def key_of(row: Mapping[str, Any]) -> RowKey:
    """Returns the key of a row of ``rounds.parquet``."""
    return RowKey(str(row["model"]), str(row["selected_on"]))


BEST_ROUND = "_best_round"
"""Ends the names of values that are the best of all evaluations of a run."""


def final_by_key(run: Run) -> dict[RowKey, dict[str, Any]]:
    """Returns the rows of the run's last evaluation (``run.measured``) by their keys; none of a run without any."""
    return {key_of(row): row for row in final_rows(run.rounds, run.measured)}


def best_rounds(run: Run, key: RowKey) -> dict[str, float]:
    """The best value of the task's first metric over all evaluations of a row, mean over clients and pooled.

    The choice of the round has seen the very data that the value is of. Values are nan where evaluations are of drawn
    clients: the best of them would be that of the luckiest clients.
    """
    first = metrics_of(run.rounds)[0]
    names = (first.name, f"pooled_{first.name}")
    if drawn_clients(run) is not None:
        return {f"{name}{BEST_ROUND}": float("nan") for name in names}
    field = pc.field
    rows = run.rounds.filter(
        run.measured.rows & (field("model") == key.model) & (field("selected_on") == key.selected_on)
    )
    best = pc.max if first.sign > 0 else pc.min
    found = {name: best(rows[name]).as_py() for name in names}
    return {f"{name}{BEST_ROUND}": float("nan") if value is None else value for name, value in found.items()}


def shown_key(run: Run) -> RowKey | None:
    """Returns the row that stands for a run: the chosen one, else its personalized model; None where it is missing."""
    if not run.chosen:
        return own_key(run)
    wanted = RowKey(run.chosen, "validation" if run.chosen.endswith("=best") else "")
    return wanted if wanted in final_by_key(run) else None


def own_key(run: Run) -> RowKey | None:
    """Returns the row of the method's personalized model, never chosen on test data; None if it was not evaluated.

    No other row stands in for it: a number under the name of a method is that of its personalized model, or none.
    """
    wanted = RowKey(*run.own.summary)
    return wanted if wanted in final_by_key(run) else None


def lacking(run: Run) -> str:
    """Returns why a run that was evaluated lacks the row that stands for it; empty where it has one."""
    if not final_by_key(run) or shown_key(run) is not None:
        return ""
    if run.chosen:
        return f"it has no row {run.chosen!r}; there are {', '.join(dict.fromkeys(k.model for k in final_by_key(run)))}"
    if run.own.sweep is not None and run.measured.split == "validation":
        return (
            f"its {run.own.sweep} is chosen on validation data, and rows of the choice are of test data: name a "
            f"{run.own.sweep} with --model"
        )
    if run.own.sweep is not None:
        return (
            f"it has no {run.own.sweep} that was chosen on validation data: its second phase has not begun, or no "
            "client has validation samples (holdout.validation, evaluation.splits)"
        )
    known = ", ".join(dict.fromkeys(key.model for key in final_by_key(run)))
    return (
        f"it has no row {run.own.model!r}, the method's personalized model, in this evaluation; there are {known}: "
        "name one with --model"
    )


def rounds_done(run: Run) -> str:
    """Returns how many rounds are done, in words."""
    early = run.ended_early and run.rounds_completed < run.total_rounds
    return f"{run.rounds_completed} of {run.total_rounds}{', ended early' if early else ''}"


def evaluated(run: Run) -> str:
    """Returns in words whose samples the last evaluation was of: ``all 14 clients``, or ``12 of 14 clients``."""
    count = max((int(row["clients"]) for row in final_by_key(run).values()), default=0)
    if run.measured.cohort == "selected":
        return f"the last cohort, {count} clients"
    held = " held out from training" if run.measured.cohort == "unseen" else ""
    return f"{'all ' if count == run.measured_clients else ''}{of_clients(count, run.measured_clients)} clients{held}"


def drawn_clients(run: Run) -> int | None:
    """Returns how many drawn clients earlier evaluations were of (``evaluation.clients``); None where of all."""
    asked = run.content.get("evaluation", {}).get("clients", "all")
    return None if run.measured.cohort != "all" or asked in ("all", run.num_clients) else int(asked)


def drawn(runs: Iterable[Run]) -> str:
    """Returns in words of whom earlier evaluations were; empty where of all clients."""
    asked = {drawn_clients(run) for run in runs if run.measured.cohort == "all"}
    if not asked - {None}:
        return ""
    sizes = " or ".join(sorted("all" if size is None else str(size) for size in asked))
    return f" Evaluations before the last round are of {sizes} clients, drawn for each of them."


def main_keys(run: Run) -> list[RowKey]:
    """Returns the rows with a curve, the personalized model last; of a sweep its choice and its local end."""
    rows = run.rounds.filter(run.measured.rows).select(["model", "selected_on"])
    keys = dict.fromkeys(key_of(row) for row in rows.to_pylist())
    if run.own.sweep is not None:
        wanted = {RowKey(*run.own.summary), RowKey(f"{run.own.sweep}=1.0")}
        keys = dict.fromkeys(key for key in keys if key in wanted or not run.own.is_member(key.model))
    own = own_key(run)
    return [key for key in keys if key != own] + ([own] if own in keys else [])


def compared_keys(run: Run) -> list[RowKey]:
    """Returns the rows of a table of methods: all but the single members of a sweep."""
    return [key for key in final_by_key(run) if key.selected_on or not run.own.is_member(key.model)]


def curve(run: Run, key: RowKey, metric: str) -> Curve | None:
    """Returns a metric of a row over the run; None where it was never measured."""
    chosen = summaries(run.rounds, key.model, key.selected_on, run.measured)
    if not chosen.num_rows:
        return None
    rounds = chosen["round"].to_numpy()
    return Curve(
        rounds,
        _floats(chosen[metric]),
        _floats(chosen[f"{metric}_std"]),
        _floats(chosen["bytes_down"]) + _floats(chosen["bytes_up"]),
        _seconds_until(run, rounds),
        chosen["clients"].to_numpy(),
    )


def wall_seconds(run: Run) -> float | None:
    """Returns the seconds of all completed rounds; None where times of some are missing."""
    seconds = _seconds_until(run, np.array([run.rounds_completed]))
    return None if seconds is None else float(seconds[0])


def client_rows(run: Run, key: RowKey) -> pa.Table | None:
    """Returns the rows of clients for the last evaluation of a model, by client.

    None where each client has a model of its own choice, which has no rows of its own.
    """
    row = final_by_key(run)[key]
    model = row["choice"] if key.selected_on else key.model
    if not model:
        return None
    return rows_of_clients(run.clients, model, row["round"], run.measured)


def scored_clients(run: Run) -> frozenset[int]:
    """Returns the clients that the last evaluation (``run.measured``) was of."""
    rows = run.clients.filter(run.measured.rows)
    return frozenset(where(rows, round=pc.max(rows["round"]).as_py())["client"].to_pylist())


def covered(run: Run, key: RowKey, column: str) -> int | None:
    """Returns how many clients a number of the last evaluation is over: those with samples for which it is defined.

    None where that is not known: each client has a model of its own choice, and the metric is undefined somewhere.

    Args:
        run: the run.
        key: of the row.
        column: of ``rounds.parquet``, or of a best round.
    """
    everybody, rows = int(final_by_key(run)[key]["clients"]), client_rows(run, key)
    name = column.removesuffix(BEST_ROUND)
    if name not in run.clients.column_names:
        if name.startswith("pooled_"):
            return everybody
        name = metrics_of(run.rounds)[0].name  # the worst clients and the fairness index are by the first metric
    if rows is not None:
        return everybody - int(rows[name].null_count)
    last = where(run.clients.filter(run.measured.rows), round=final_by_key(run)[key]["round"])
    return None if last[name].null_count else everybody


def bins(run: Run, key: RowKey) -> pa.Table:
    """Returns the calibration bins of a row of the last evaluation, ascending; empty where there are none."""
    row = final_by_key(run)[key]
    field = pc.field
    return run.calibration.filter(
        (field("round") == row["round"])
        & run.measured.rows
        & (field("model") == key.model)
        & (field("selected_on") == key.selected_on)
    ).sort_by("bin")


def split_sizes(partition: pa.Table) -> dict[str, np.ndarray]:
    """Returns the samples of every client by split, int64 of shape (K,)."""
    count = (pc.max(partition["client"]).as_py() or 0) + 1
    owned = {
        split: partition.filter((pc.field("split") == split) & (pc.field("client") >= 0))["client"].to_numpy()
        for split in SPLITS
    }
    return {split: np.bincount(clients, minlength=count) for split, clients in owned.items()}


def _seconds_until(run: Run, rounds: np.ndarray) -> np.ndarray | None:
    by_round = {int(line["round"]): seconds_spent(line) for line in run.timings}
    needed = range(1, int(rounds.max(initial=0)) + 1)
    if not needed or any(number not in by_round for number in needed):
        return None
    until: np.ndarray = np.cumsum([by_round[number] for number in needed])[rounds - 1]
    return until


def _floats(column: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=float)
