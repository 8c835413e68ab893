"""Reads what a run has left in its folder.

No code that the run's configuration names is imported: the folder may be somebody else's.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from rayfl.config.plain_yaml import read_yaml
from rayfl.config.redaction import redact
from rayfl.data.partitions.assignment import ASSIGNMENT_SCHEMA, assignment_hash
from rayfl.errors import DamageError, RayflError, RunError
from rayfl.results.personalized import PersonalizedRows, personalized_rows_of, recorded_clients, recorded_unseen
from rayfl.results.schemas import ALL_TABLES
from rayfl.runs.damage import described
from rayfl.runs.measured import Measured
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.run_folder import CONFIG
from rayfl.storage.tables import from_parquet
from rayfl.tracking.costs import FILE as COSTS
from rayfl.tracking.environment import read_environment
from rayfl.tracking.timings import FILE as TIMINGS
from rayfl.tracking.timings import read_lines

_MANIFEST = re.compile(r"manifest-(\d+)\.json")


@dataclass(frozen=True, eq=False)
class Run:
    """A run as its folder has it.

    Attributes:
        uri: the folder, without credentials.
        name: its last part.
        config: the resolved configuration.
        own: which rows are the method's personalized model.
        num_clients: K, that may train; None where neither the tables nor a partition say it.
        num_unseen: how many further clients are held out from training.
        costs: what each round took (``rayfl.tracking.costs``), a mapping a round; empty where it was not noted.
        rounds: summaries, schema ``rayfl.results.schemas.ROUNDS_SCHEMA``.
        clients: rows of clients, schema ``rayfl.results.schemas.CLIENTS_SCHEMA``.
        skipped: clients that were left out, schema ``rayfl.results.tables.SKIPPED_SCHEMA``.
        damage: what damage to files has cost the run, schema ``rayfl.results.tables.DAMAGE_SCHEMA``.
        calibration: bins, schema ``rayfl.results.calibration.CALIBRATION_SCHEMA``; empty in runs from before there were
            any.
        timings: seconds by phase, a mapping a round.
        partition: who owns which sample, schema ``rayfl.data.partitions.assignment.ASSIGNMENT_SCHEMA``; None where it
            is missing.
        partition_hash: SHA-256 of that; empty where it is missing.
        environment: with what it was made, an entry for each start; empty where that is not known.
        rounds_completed: rounds done.
        notes: what a reader should know, a sentence each.
        measured: which of its evaluations are looked at.
        chosen: the row that stands for the run; empty for its method's personalized model.
    """

    uri: str
    name: str
    config: Mapping[str, Any]
    own: PersonalizedRows
    num_clients: int | None
    rounds: pa.Table
    clients: pa.Table
    skipped: pa.Table
    calibration: pa.Table
    damage: pa.Table
    timings: Sequence[Mapping[str, float]]
    partition: pa.Table | None
    partition_hash: str
    environment: Sequence[Mapping[str, Any]]
    rounds_completed: int
    notes: list[str] = field(default_factory=list)
    measured: Measured = field(default_factory=Measured)
    chosen: str = ""
    num_unseen: int = 0
    costs: Sequence[Mapping[str, float]] = ()

    @property
    def measured_clients(self) -> int | None:
        """How many clients the chosen evaluations are about; None where that is not known."""
        return self.num_unseen if self.measured.cohort == "unseen" else self.num_clients

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.config["algorithm"]["name"])

    @property
    def dataset(self) -> str:
        """The data set's name."""
        return str(self.config["dataset"]["name"])

    @property
    def seed(self) -> int:
        """Seed of every random stream."""
        return int(self.config["seed"])

    @property
    def total_rounds(self) -> int:
        """Rounds that the configuration asks for."""
        return int(self.config["train"]["rounds"])

    @property
    def recorded(self) -> bool:
        """Whether its tables say themselves which rows are the method's personalized model."""
        return PersonalizedRows.recorded(self.rounds) is not None

    @property
    def finished(self) -> bool:
        """Whether all rounds are done."""
        return self.rounds_completed >= self.total_rounds


def load_runs(uris: Sequence[str], methods: Mapping[str, Any], models: Sequence[str] = ()) -> list[Run]:
    """Reads several runs; see :func:`load_run`.

    Args:
        uris: folders of runs, or of several runs: a sweep's, or a reproduction's.
        methods: see :func:`load_run`.
        models: see :func:`load_run`.

    Raises:
        RunError: listing everything that cannot be read, or a folder that is given twice.
    """
    runs: list[Run] = []
    problems: list[str] = []
    for uri in [one for given in uris for one in runs_in(given)]:
        try:
            run = load_run(uri, methods, models)
        except RayflError as error:
            problems.append(str(error))
            continue
        if run.uri in {other.uri for other in runs}:
            problems.append(f"{run.uri} is given twice")
        runs.append(run)
    if problems:
        raise RunError("; ".join(problems))
    return runs


def runs_in(uri: str) -> list[str]:
    """The runs that a folder stands for: itself, or if it is none, those that lie in it, by name.

    A sweep's folder and a reproduction's have a run's folder for each of their experiments.
    """
    place = uri.rstrip("/") or "/"
    storage = Storage(place)
    if storage.exists(CONFIG):
        return [uri]
    address, mark, options = place.partition("?")
    inner = [name for name in sorted(storage.entries()) if storage.exists(f"{name}/{CONFIG}")]
    return [f"{address.rstrip('/')}/{name}{mark}{options}" for name in inner] or [uri]


def load_run(uri: str, methods: Mapping[str, Any], models: Sequence[str] = ()) -> Run:
    """Reads a run.

    Args:
        uri: its folder, a path or a URI.
        methods: the classes of all built-in methods by name; they know the rows of their personalized models.
        models: rows that the user names for runs that do not say which is the personalized model.

    Raises:
        RunError: there is no run, it is of an unknown format, or does not say which row is the personalized model.
        DamageError: a file of it cannot be read, naming it.
    """
    storage = Storage(uri.rstrip("/") or "/")
    shown = redact(str(storage.local_path or uri).rstrip("/"))
    config = _config(storage, shown)
    tables = {name: _table(storage, shown, name) for name in ALL_TABLES}
    if tables["rounds"].num_rows and not tables["clients"].num_rows:
        raise DamageError(f"{shown} has rounds.parquet, but clients.parquet is missing: {_LOOK}")
    notes = described(tables["damage"])
    method = str(config["algorithm"]["name"])
    own = personalized_rows_of(tables["rounds"], methods.get(method), shown, method, models)
    partition = _partition(storage, shown)
    if partition is None:
        notes.append("partition.parquet is missing: which samples the clients own is not known")
    return Run(
        uri=shown,
        name=re.split(r"[/\\]", shown.partition("?")[0].rstrip("/"))[-1],
        config=config,
        own=own,
        num_clients=_num_clients(tables["rounds"], partition),
        **tables,
        timings=_lines(storage, shown, TIMINGS),
        costs=_lines(storage, shown, COSTS),
        partition=partition,
        partition_hash="" if partition is None else assignment_hash(partition),
        environment=read_environment(storage),
        rounds_completed=_rounds_completed(storage, tables["rounds"]),
        notes=notes,
        num_unseen=recorded_unseen(tables["rounds"]),
    )


def check_measured(runs: Sequence[Run]) -> None:
    """Refuses evaluations that only some experiments have, of runs of which one was evaluated without them.

    Raises:
        RunError: naming the run, and the option that makes them.
    """
    options = {"unseen": "evaluation.unseen_clients=0.1", "official": "evaluation.official_personalized=true"}
    for run in runs:
        for wanted in (run.measured.cohort, run.measured.split):
            rows = run.rounds.filter((pc.field("cohort") != "server") & run.measured.rows)
            if wanted in options and run.rounds.num_rows and not rows.num_rows:
                raise RunError(
                    f"{run.uri} has no rows for {run.measured.options}: they come with {options[wanted]}, in a new run"
                )


_LOOK = "`rayfl verify` says what else is wrong; the command that started the run writes its tables again"


def _config(storage: Storage, shown: str) -> Mapping[str, Any]:
    try:
        content = read_yaml(storage.read("config.yaml"))
    except FileNotFoundError:
        raise RunError(
            f"{shown} is no run's folder: it has no config.yaml; give the folder that `rayfl run` names at its end"
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DamageError(f"config.yaml in {shown} is damaged: {error}") from None
    try:
        content["algorithm"]["name"], content["dataset"]["name"]
        int(content["seed"]), int(content["train"]["rounds"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(f"config.yaml in {shown} is no resolved configuration of a run ({error!r})") from None
    return dict(content)


def _table(storage: Storage, shown: str, name: str) -> pa.Table:
    schema = ALL_TABLES[name]
    try:
        table = from_parquet(storage.read(f"{name}.parquet"))
    except FileNotFoundError:
        return schema.empty_table()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamageError(f"{name}.parquet in {shown} is damaged ({error}): {_LOOK}") from None
    if not set(schema) <= set(table.schema):
        raise DamageError(f"{name}.parquet in {shown} has other columns than a table of {name}: {_LOOK}")
    return table


def _partition(storage: Storage, shown: str) -> pa.Table | None:
    try:
        table = pq.read_table(io.BytesIO(storage.read("partition.parquet")))
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamageError(f"partition.parquet in {shown} is damaged ({error}): {_LOOK}") from None
    if not table.schema.equals(ASSIGNMENT_SCHEMA):
        raise DamageError(f"partition.parquet in {shown} has other columns than a partition: {_LOOK}")
    return table


def _lines(storage: Storage, shown: str, file: str) -> list[dict[str, float]]:
    try:
        lines = [{name: float(value) for name, value in line.items()} for line in read_lines(storage, file)]
        return sorted(lines, key=lambda line: line["round"])
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamageError(f"{file} in {shown} is damaged ({error}): delete it to do without what it says") from None


def _rounds_completed(storage: Storage, rounds: pa.Table) -> int:
    numbers = [_MANIFEST.fullmatch(name) for name in CommitStore(storage).manifests()]
    evaluated = max(rounds["round"].to_pylist(), default=0)
    return max([evaluated, *(int(found[1]) for found in numbers if found)])


def _num_clients(rounds: pa.Table, partition: pa.Table | None) -> int | None:
    recorded = recorded_clients(rounds)
    if recorded is not None or partition is None:
        return recorded
    return int(pc.max(partition["client"]).as_py()) + 1
