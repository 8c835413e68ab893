"""The files of a sweep's folder: what it varies, what a scheduler has stopped, and the tables of the results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
import yaml

from rayfl.config.plain_yaml import read_yaml
from rayfl.errors import RunError
from rayfl.experiment.parts import Parts
from rayfl.results.schemas import ROUNDS_SCHEMA
from rayfl.storage.own_files import is_temporary
from rayfl.storage.tables import read_whole, to_parquet
from rayfl.sweeps.measures import Measure
from rayfl.sweeps.report import FINISHED, groups_table, trials_table
from rayfl.sweeps.trials import Sweep, Trial

RECORD = "sweep.yaml"
STOPPED_FILE = "stopped.yaml"
_TABLES = ("trials.parquet", "groups.parquet")
_LEFT_S = 3600.0
"""A temporary file so much older than the record is a killed process's: nobody writes for so long, in seconds."""


def of_a_beginning(name: str) -> bool:
    """Returns whether a file may be in the folder of a sweep whose first start was cut short."""
    return is_temporary(name, lambda own: own == RECORD)


def write_record(sweep: Sweep) -> None:
    """Notes what the sweep is about, before it begins, and deletes temporary files that killed ones have left."""
    points = {trial.name: trial.point for trial in sweep.trials}
    content = yaml.safe_dump({"varied": list(sweep.varied), "experiments": points}, sort_keys=False)
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
    """Notes which experiments a scheduler has stopped, and after how many rounds."""
    sweep.folder.write(STOPPED_FILE, yaml.safe_dump(dict(stopped)).encode())


@dataclass(frozen=True)
class Committed:
    """What an experiment has committed: rounds, the table of summaries, and what is wrong with its folder."""

    rounds: int = 0
    table: pa.Table = field(default_factory=ROUNDS_SCHEMA.empty_table)
    problem: str = ""


def committed(trial: Trial) -> Committed:
    """Returns what there is of one experiment, without an error."""
    store = Parts(trial.config).commits
    try:
        manifest = store.latest()
        if manifest is None:
            return Committed()
        return Committed(manifest.rounds_completed, read_whole(store, manifest, "rounds"))
    except RunError as error:
        return Committed(problem=str(error))


def write_tables(
    sweep: Sweep, measure: Measure, failures: Mapping[str, str], stopped: Mapping[str, int]
) -> tuple[pa.Table, pa.Table]:
    """Writes and returns the tables of the whole sweep (trials, groups), from what is on storage."""
    rows = []
    for trial in sweep.trials:
        found = committed(trial)
        reason = failures.get(trial.name, "") or found.problem
        status = FINISHED if found.rounds == trial.config.train.rounds else "unfinished"
        if status != FINISHED:
            status = "failed" if reason else "stopped" if trial.name in stopped else status
        values = measure.summary(found.table, trial.config.algorithm)
        row = {"trial": trial.name, "status": status, "reason": reason, "rounds": found.rounds, "point": trial.point}
        rows.append({**row, **values})
    trials = trials_table(rows, sweep.varied, measure)
    groups = groups_table(trials, sweep.varied, measure)
    for name, table in zip(_TABLES, (trials, groups), strict=True):
        sweep.folder.write(name, to_parquet(table))
    return trials, groups
