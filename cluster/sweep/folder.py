"""Reads and writes the files of a sweep's folder: its record, stopped experiments, and tables of results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
import yaml

from rayfl.config.plain_yaml import read_yaml, write_yaml
from rayfl.errors import RunError
from rayfl.experiment.parts import Parts
from rayfl.results.schemas import METRICS, ROUNDS_SCHEMA
from rayfl.storage.own_files import is_lease, is_temporary
from rayfl.storage.tables import read_whole, to_parquet
from rayfl.sweeps.measures import Measure
from rayfl.sweeps.report import FINISHED, groups_table, trials_table
from rayfl.sweeps.trials import Sweep, Trial

RECORD = "sweep.yaml"
STOPPED_FILE = "stopped.yaml"
_TABLES = ("trials.parquet", "groups.parquet")
_LEFT_S = 3600.0
"""A temporary file this many seconds older than the record was left by a killed process."""


def of_a_beginning(name: str) -> bool:
    """Returns whether a file may be in the folder of a sweep whose first start was cut short."""
    return is_lease(name) or is_temporary(name, lambda own: own == RECORD)


def write_record(sweep: Sweep) -> None:
    """Writes the sweep's record before it begins, and deletes temporary files of killed processes."""
    points = {trial.name: trial.point for trial in sweep.trials}
    content = write_yaml({"varied": list(sweep.varied), "experiments": points})
    sweep.folder.write(RECORD, content.encode())
    written = sweep.folder.modified(RECORD)
    for name in sweep.folder.names():
        if is_temporary(name, lambda own: own in (RECORD, STOPPED_FILE, *_TABLES)):
            with suppress(FileNotFoundError):
                if written - sweep.folder.modified(name) > _LEFT_S:
                    sweep.folder.delete(name)


def read_stopped(sweep: Sweep) -> dict[str, int]:
    """Rounds of the experiments that a scheduler has stopped, by name.

    Raises:
        RunError: when the file is damaged.
    """
    if not sweep.folder.exists(STOPPED_FILE):
        return {}
    try:
        return {str(name): int(rounds) for name, rounds in read_yaml(sweep.folder.read(STOPPED_FILE)).items()}
    except (yaml.YAMLError, AttributeError, ValueError, TypeError, RecursionError) as error:
        raise RunError(f"{sweep.folder.uri}/{STOPPED_FILE} is damaged ({error}); delete it to go on") from error


def write_stopped(sweep: Sweep, stopped: Mapping[str, int]) -> None:
    """Records which experiments a scheduler has stopped, and after how many rounds."""
    sweep.folder.write(STOPPED_FILE, write_yaml(dict(stopped)).encode())


@dataclass(frozen=True)
class Committed:
    """The committed rounds of an experiment, its tables, and the problem with its folder if any.

    The table of clients is there only if it was asked for.
    """

    rounds: int = 0
    ended_early: bool = False
    table: pa.Table = field(default_factory=ROUNDS_SCHEMA.empty_table)
    problem: str = ""
    clients: pa.Table | None = None

    def over(self, trial: Trial) -> bool:
        """Returns whether the experiment is finished."""
        return self.ended_early or self.rounds >= trial.config.train.rounds


def committed(trial: Trial, with_clients: bool = False) -> Committed:
    """Returns what one experiment has committed; a damaged folder is reported, not raised."""
    store = Parts(trial.config).commits
    try:
        manifest = store.latest()
        if manifest is None:
            return Committed()
        clients = read_whole(store, manifest, "clients") if with_clients else None
        rounds = read_whole(store, manifest, "rounds")
        return Committed(manifest.rounds_completed, manifest.ended_early, rounds, clients=clients)
    except RunError as error:
        return Committed(problem=str(error))


def write_tables(
    sweep: Sweep, measure: Measure, failures: Mapping[str, str], stopped: Mapping[str, int]
) -> tuple[pa.Table, pa.Table]:
    """Writes and returns the tables of the whole sweep (trials, groups), from what is on storage."""
    rows = []
    for trial in sweep.trials:
        found = committed(trial, with_clients=measure.metric not in METRICS)
        reason = failures.get(trial.name, "") or found.problem
        status = FINISHED if found.over(trial) else "unfinished"
        if status != FINISHED:
            status = "failed" if reason else "stopped" if trial.name in stopped else status
        values = measure.summary(found.table, trial.config.algorithm, found.clients)
        row = {"trial": trial.name, "status": status, "reason": reason, "rounds": found.rounds, "point": trial.point}
        rows.append({**row, **values})
    trials = trials_table(rows, sweep.varied, measure)
    groups = groups_table(trials, sweep.varied, measure)
    for name, table in zip(_TABLES, (trials, groups), strict=True):
        sweep.folder.write(name, to_parquet(table))
    return trials, groups
