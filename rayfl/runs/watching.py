"""How far a run is, from its folder: what another shell, or another machine, sees of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rayfl.config.schema import ExperimentConfig
from rayfl.errors import RunError
from rayfl.metrics import CLASSIFICATION, Metric
from rayfl.results.schemas import first_metric
from rayfl.runs.folder import RunFolder, open_run
from rayfl.storage.lease import FILE as LEASE
from rayfl.storage.lease import Holder, read_lease
from rayfl.tracking.environment import read_environment
from rayfl.tracking.live import LiveView, newcomers_text, score_text
from rayfl.tracking.timings import read_timings, seconds_spent

_RECENT = 10
"""The pace is the mean over this number of rounds."""


@dataclass(frozen=True)
class Standing:
    """How far a run is.

    Attributes:
        folder: of the run.
        method: its name.
        dataset: its name.
        rounds_completed: rounds that are committed.
        rounds: T.
        state: ``finished``, ``running``, or ``stopped`` (no process works on it).
        holder: the process that works on the run, in words; empty for none.
        seconds_a_round: mean over the last rounds that are timed; None before the first.
        seconds_left: for the rounds to come, at that pace; None before the first, 0 for a finished run.
        evaluated: after which round all clients were evaluated last; None before the first time.
        metric: the name of what the task is judged by first.
        score: its mean over clients of the personalized model on test data then; None where there is none.
        accuracy: the same, if the metric is accuracy.
        devices: number of actors by device.
    """

    folder: str
    method: str
    dataset: str
    rounds_completed: int
    rounds: int
    state: str
    holder: str
    seconds_a_round: float | None
    seconds_left: float | None
    evaluated: int | None
    metric: str
    score: float | None
    accuracy: float | None
    devices: dict[str, int]


def standing(path: str, schema: type[ExperimentConfig]) -> tuple[Standing, LiveView]:
    """Looks at a run that may be under way; nothing is written, and no code that it names is imported.

    Args:
        path: its folder, a path or a URI.
        schema: the configuration class.

    Returns:
        How far it is, and the view of it that `rayfl run` has on a terminal.

    Raises:
        RunError: there is no run.
    """
    run = open_run(path, schema)
    rounds = run.config.train.rounds
    completed = max(run.kept(), default=0)
    holder = _holder(run)
    state = "finished" if completed >= rounds or run.ended_early else "running" if holder else "stopped"
    pace = _pace(run, completed)
    rows, unseen = _rows(run), _rows(run, "unseen")
    evaluated = max((int(row["round"]) for row in rows), default=None)
    own = [row for row in rows if run.own.is_summary(row)] if rows else []
    first = first_metric(run.rounds) if rows else CLASSIFICATION.first
    newest = [row[first.name] for row in own if row["round"] == evaluated][:1]
    score = None if newest in ([], [None]) else float(newest[0])
    entries = read_environment(run.storage)
    devices = entries[-1].get("devices") if entries else None
    found = Standing(
        folder=run.uri,
        method=run.config.algorithm.name,
        dataset=run.config.dataset.name,
        rounds_completed=completed,
        rounds=rounds,
        state=state,
        holder="" if holder is None else str(holder),
        seconds_a_round=pace,
        seconds_left=None if pace is None else pace * (0 if state == "finished" else rounds - completed),
        evaluated=evaluated,
        metric=first.name,
        score=score,
        accuracy=score if first == CLASSIFICATION.first else None,
        devices=dict(devices) if isinstance(devices, dict) else {},
    )
    return found, _view(found, rows, unseen, run, first)


def _view(
    found: Standing, rows: list[dict[str, Any]], unseen: list[dict[str, Any]], run: RunFolder, first: Metric
) -> LiveView:
    hosts = [{"device": device} for device, count in found.devices.items() for _ in range(count)]
    view = LiveView(found.rounds, found.rounds_completed, hosts, first.label)
    view.over = found.state == "finished"
    view.paced(found.seconds_a_round)
    for number in sorted({int(row["round"]) for row in rows}):
        those = [row for row in rows if row["round"] == number]
        view.score, curve = score_text(those, run.own, run.num_clients, first)
        view.newcomers = newcomers_text([row for row in unseen if row["round"] == number], run.own, first)
        if curve is not None:
            view.evaluated(number, curve)
    view.state = f"{found.state}, {found.holder}" if found.holder else found.state
    return view


def _pace(run: RunFolder, completed: int) -> float | None:
    """Seconds a round, of the last rounds that are committed."""
    try:
        lines = [line for line in read_timings(run.storage) if line["round"] <= completed][-_RECENT:]
    except (ValueError, LookupError, TypeError):
        return None
    return sum(map(seconds_spent, lines)) / len(lines) if lines else None


def _rows(run: RunFolder, cohort: str = "all") -> list[dict[str, Any]]:
    if not run.storage.exists("rounds.parquet"):
        return []
    rows: list[dict[str, Any]] = run.rounds.to_pylist()
    return [row for row in rows if (row["cohort"], row["split"], row["phase"]) == (cohort, "test", "received")]


def _holder(run: RunFolder) -> Holder | None:
    """Returns who works on the run; None for nobody. Of another machine's process, its last sign of life decides."""
    try:
        holder = read_lease(run.storage)
    except RunError:
        return None
    if holder is None or (lives := holder.is_alive()) is False:
        return None
    if lives:
        return holder
    try:
        age = time.time() - run.storage.modified(LEASE)
    except FileNotFoundError:
        return None
    return holder if age < run.config.storage.lease_timeout_s else None
