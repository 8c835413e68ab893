"""The clients of a run, a row each, filtered and sorted."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rayfl.errors import ConfigError, RunError
from rayfl.results.schemas import METRICS, metrics_of
from rayfl.runs.folder import RunFolder
from rayfl.runs.measured import Cohort, Measured, Split
from rayfl.runs.rows import NO_UNSEEN, attendance, last_round, named_model, rows_of_clients, where

_BEFORE, _AFTER = ("client", "name", "n"), ("selected", "last", "skipped", "down", "up")
COLUMNS = (*_BEFORE, *METRICS, *_AFTER)
"""Of classification: ``n`` samples of the split, the metrics, in how many rounds the client was selected and in which
last (0: never), in how many it was left out, and the bytes that went down to it and up from it."""

_TEXT = {"name"}
_CONDITION = re.compile(r"^\s*(\w+)\s*(<=|>=|==|!=|=|<|>)\s*(.+?)\s*$")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}


def listed_clients(
    run: RunFolder, model: str | None, split: Split, round: int | None, cohort: Cohort = "all"
) -> tuple[list[dict[str, Any]], str, int]:
    """Returns a row with :data:`COLUMNS` for every client that was evaluated.

    Selections, bytes and skipped rounds are those up to the round; of selections only those that were scored
    (``evaluation.cohort_every``).

    Args:
        run: the run.
        model: a row of the tables; None: the method's personalized model.
        split: ``validation``, ``test`` or ``official``.
        round: an evaluated round; None: the last.
        cohort: ``all`` that may train, or ``unseen`` for those held out from training.

    Returns:
        The rows by client, the model's name, and the round.

    Raises:
        RunError: when there are no such rows, naming what there is.
    """
    measured = Measured(split, cohort)
    table = run.clients.filter(measured.rows)
    if cohort == "unseen" and not table.num_rows:
        raise RunError(NO_UNSEEN.format(run.uri, split))
    if not table.num_rows:
        raise RunError(f"{run.uri} has no evaluation of all clients on the split {split}")
    chosen = last_round(table) if round is None else round
    models = where(table, round=chosen)["model"].unique().to_pylist()
    if not models:
        shown = ", ".join(map(str, sorted(table["round"].unique().to_pylist())))
        raise RunError(f"{run.uri}: clients were evaluated after rounds {shown}, not after {chosen}")
    name = named_model(run, model, models, chosen, cohort)
    if name not in models:
        raise RunError(f"{run.uri} has no model {name!r} after round {chosen}; there are: {', '.join(models)}")
    until = pc.field("round") <= chosen
    parts, left_out = _by_client(attendance(run.clients).filter(until)), _by_client(run.skipped.filter(until))
    names, listed = metric_columns(run.clients), []
    for row in rows_of_clients(table, name, chosen, measured).to_pylist():
        own = parts.get(row["client"], [])
        listed.append(
            {column: row[column] for column in (*_BEFORE, *names)}
            | {
                "selected": len(own),
                "last": max((part["round"] for part in own), default=0),
                "skipped": len({part["round"] for part in left_out.get(row["client"], [])}),
                "down": sum(part["bytes_down"] or 0 for part in own),
                "up": sum(part["bytes_up"] or 0 for part in own),
            }
        )
    return listed, name, chosen


def chosen_rows(
    rows: Sequence[dict[str, Any]], conditions: Sequence[str], sort: str | None, descending: bool, limit: int | None
) -> list[dict[str, Any]]:
    """The rows that meet all conditions, sorted.

    Args:
        rows: of :func:`listed_clients`.
        conditions: ``column<value``, with one of < <= > >= = !=; names are compared as text.
        sort: a column; None keeps the order.
        descending: the largest first.
        limit: at most this number of rows.

    Raises:
        ConfigError: for a condition that cannot be read, or an unknown column.
    """
    columns = tuple(rows[0]) if rows else COLUMNS
    tests = [_test(condition, columns) for condition in conditions]
    found = [row for row in rows if all(test(row) for test in tests)]
    if sort is not None:
        _check_column(sort, "--sort", columns)
        # What is undefined comes last, whatever the order.
        known, unknown = ([row for row in found if (row[sort] is None) is missing] for missing in (False, True))
        found = [*sorted(known, key=lambda row: row[sort], reverse=descending), *unknown]
    elif descending:
        found.reverse()
    return found[:limit]


def metric_columns(clients: pa.Table) -> list[str]:
    """The metrics that a run's table of clients has: of classification in the order of the tables, else the task's."""
    names = [metric.name for metric in metrics_of(clients)]
    return [*[name for name in METRICS if name in names], *[name for name in names if name not in METRICS]]


def _test(condition: str, columns: Sequence[str]) -> Callable[[dict[str, Any]], bool]:
    match = _CONDITION.match(condition)
    if match is None:
        raise ConfigError(f"--filter: {condition!r} must look like top1<0.5, with one of < <= > >= = !=")
    column, sign, text = match.groups()
    _check_column(column, "--filter", columns)
    value: str | float = text
    if column not in _TEXT:
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"--filter: {condition!r} must have a number on its right side") from None
    compare = _OPERATORS[sign]
    return lambda row: row[column] is not None and compare(row[column], value)


def _check_column(column: str, option: str, columns: Sequence[str]) -> None:
    if column not in columns:
        raise ConfigError(f"{option}: there is no column {column!r}; there are {', '.join(columns)}")


def _by_client(table: pa.Table) -> dict[int, list[dict[str, Any]]]:
    result: dict[int, list[dict[str, Any]]] = {}
    for row in table.to_pylist():
        result.setdefault(row["client"], []).append(row)
    return result
