"""Reads what a run has left in its folder, for reports, plots, and commands.

No code that the run's configuration names is imported: the folder may be somebody else's.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from rayfl.config.plain_yaml import read_yaml
from rayfl.config.redaction import redact
from rayfl.data.partitions.assignment import ASSIGNMENT_SCHEMA, assignment_hash
from rayfl.errors import DamageError, RunError
from rayfl.naming.printed import PRINTED
from rayfl.results.personalized import PersonalizedRows, personalized_rows_of, recorded_clients, recorded_unseen
from rayfl.results.schemas import ALL_TABLES, CONTENT_KEY, METHOD_KEY
from rayfl.runs.damage import described
from rayfl.runs.measured import Measured
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.tables import from_parquet
from rayfl.tracking.costs import FILE as COSTS
from rayfl.tracking.environment import read_environment
from rayfl.tracking.timings import FILE as TIMINGS
from rayfl.tracking.timings import read_lines

_MANIFEST = re.compile(r"manifest-(\d+)\.json")


class Run:
    """A run as its folder has it. Files are read when they are first asked for.

    Args:
        storage: the folder.
        content: its configuration as plain data.
        method: the run's method as a class or an object, where no code of a user has to be imported for it; else None.
        named: rows that the user names for runs that do not say which is the personalized model.

    Attributes:
        measured: which of its evaluations are looked at.
        chosen: the row that stands for the run; empty for its method's personalized model.
    """

    def __init__(self, storage: Storage, content: Mapping[str, Any], method: Any, named: Sequence[str] = ()) -> None:
        self.storage = storage
        self.content = content
        self._method = method
        self._named = tuple(named)
        self.measured, self.chosen = Measured(), ""

    def viewed(self, measured: Measured | None = None, chosen: str | None = None) -> Self:
        """Returns the same run, seen otherwise.

        Args:
            measured: see the class; None: as here.
            chosen: see the class; None: as here.
        """
        other = copy(self)
        other.measured = self.measured if measured is None else measured
        other.chosen = self.chosen if chosen is None else chosen
        return other

    @property
    def uri(self) -> str:
        """The folder, without credentials."""
        return _shown(self.storage)

    @property
    def name(self) -> str:
        """The folder's own name."""
        return re.split(r"[/\\]", self.uri.partition("?")[0].rstrip("/"))[-1]

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.content["algorithm"]["name"])

    @property
    def title(self) -> str:
        """Returns the method's name in legends and tables; of a user's own method the one that its class says."""
        recorded = (self.rounds.schema.metadata or {}).get(METHOD_KEY)
        return self.method.rpartition(":")[2] if recorded is None else recorded.decode()

    @property
    def printed(self) -> str:
        """Returns the method's name as papers print it, for figures and tables of papers."""
        return PRINTED.get(self.method, self.title)

    @property
    def dataset(self) -> str:
        """The data set's name."""
        return str(self.content["dataset"]["name"])

    @property
    def seed(self) -> int:
        """Seed of every random stream."""
        return int(self.content["seed"])

    @property
    def total_rounds(self) -> int:
        """Rounds that the configuration asks for."""
        return int(self.content["train"]["rounds"])

    @cached_property
    def rounds(self) -> pa.Table:
        """Summaries over clients, schema ``rayfl.results.schemas.ROUNDS_SCHEMA``."""
        return self._table("rounds")

    @cached_property
    def clients(self) -> pa.Table:
        """One row per client, schema ``rayfl.results.schemas.CLIENTS_SCHEMA``."""
        return self._table("clients")

    @cached_property
    def skipped(self) -> pa.Table:
        """Clients that were left out, schema ``rayfl.results.schemas.SKIPPED_SCHEMA``; older runs have none."""
        return self._table("skipped")

    @cached_property
    def cohorts(self) -> pa.Table:
        """Who took part, schema ``rayfl.results.schemas.COHORTS_SCHEMA``; only runs that do not draw it again do."""
        return self._table("cohorts")

    @cached_property
    def contributions(self) -> pa.Table:
        """What clients have contributed, schema ``rayfl.results.contributions.CONTRIBUTIONS_SCHEMA``, or no rows."""
        return self._table("contributions")

    @cached_property
    def calibration(self) -> pa.Table:
        """Bins, schema ``rayfl.results.calibration.CALIBRATION_SCHEMA``; older runs have none."""
        return self._table("calibration")

    @cached_property
    def damage(self) -> pa.Table:
        """Returns what damage to files has cost the run, schema ``rayfl.results.schemas.DAMAGE_SCHEMA``."""
        return self._table("damage")

    @cached_property
    def timings(self) -> list[dict[str, float]]:
        """Seconds by phase, a mapping a round, by ascending round; empty where there are none."""
        return self._lines(TIMINGS)

    @cached_property
    def costs(self) -> list[dict[str, float]]:
        """Returns what rounds took (``rayfl.tracking.costs``), a mapping a round; empty where it was not noted."""
        return self._lines(COSTS)

    def _lines(self, file: str) -> list[dict[str, float]]:
        try:
            lines = [{name: float(value) for name, value in line.items()} for line in read_lines(self.storage, file)]
            return sorted(lines, key=lambda line: line["round"])
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
            advice = "delete it to do without what it says"
            raise DamageError(f"{file} in {self.uri} is damaged ({error}): {advice}") from None

    @cached_property
    def partition(self) -> pa.Table | None:
        """Who owns which sample, schema ``rayfl.data.partitions.assignment.ASSIGNMENT_SCHEMA``; None if missing."""
        try:
            table = pq.read_table(io.BytesIO(self.storage.read("partition.parquet")))
        except FileNotFoundError:
            return None
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DamageError(f"partition.parquet in {self.uri} is damaged ({error}): {VERIFY_HINT}") from None
        if not table.schema.equals(ASSIGNMENT_SCHEMA):
            raise DamageError(f"partition.parquet in {self.uri} has other columns than a partition: {VERIFY_HINT}")
        return table

    @cached_property
    def partition_hash(self) -> str:
        """SHA-256 of the partition; empty where it is missing."""
        return "" if self.partition is None else assignment_hash(self.partition)

    @property
    def content_hash(self) -> str | None:
        """Returns the checksum of the data set's samples; None where that is not known."""
        return (self.rounds.schema.metadata or {}).get(CONTENT_KEY, b"").decode() or None

    @cached_property
    def environment(self) -> list[dict[str, Any]]:
        """With what the run was made, an entry for each start; empty where that is not known."""
        return read_environment(self.storage)

    @property
    def num_unseen(self) -> int:
        """Returns how many clients are held out from training."""
        return recorded_unseen(self.rounds)

    @property
    def measured_clients(self) -> int | None:
        """Returns how many clients the chosen evaluations are about; None where that is not known."""
        return self.num_unseen if self.measured.cohort == "unseen" else self.num_clients

    @cached_property
    def num_clients(self) -> int | None:
        """K, that may train; None where neither the tables nor a partition say it."""
        recorded = recorded_clients(self.rounds)
        if recorded is not None or self.partition is None:
            return recorded
        return int(pc.max(self.partition["client"]).as_py()) + 1

    @cached_property
    def own(self) -> PersonalizedRows:
        """Returns which rows are the method's personalized model.

        Raises:
            RunError: nobody knows, in a run of a user's own method that an older rayfl made.
        """
        return personalized_rows_of(self.rounds, self._method, self.uri, self.method, self._named)

    @property
    def recorded(self) -> bool:
        """Returns whether its tables say themselves which rows are the method's personalized model."""
        return PersonalizedRows.recorded(self.rounds) is not None

    @cached_property
    def rounds_completed(self) -> int:
        """Rounds done."""
        numbers = [_MANIFEST.fullmatch(name) for name in CommitStore(self.storage).manifests()]
        evaluated = max(self.rounds["round"].to_pylist(), default=0)
        return max([evaluated, *(int(found[1]) for found in numbers if found)])

    @property
    def finished(self) -> bool:
        """Returns whether the run is over: all rounds are done, or it has ended early."""
        return self.rounds_completed >= self.total_rounds or self.ended_early

    @cached_property
    def ended_early(self) -> bool:
        """Returns whether the run has ended before its last round; without its newest commit nobody knows."""
        return CommitStore(self.storage).ended_early()

    @cached_property
    def notes(self) -> list[str]:
        """Returns what a reader should know, a sentence each."""
        notes = described(self.damage)
        if self.partition is None:
            notes.append("partition.parquet is missing: which samples the clients own is not known")
        return notes

    def _table(self, name: str) -> pa.Table:
        """Reads a table.

        Raises:
            DamageError: when it cannot be read, or has other columns than a table of this name.
        """
        try:
            table = from_parquet(self.storage.read(f"{name}.parquet"))
        except FileNotFoundError:
            return self._missing(name)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DamageError(f"{name}.parquet in {self.uri} is damaged ({error}): {VERIFY_HINT}") from None
        if not set(ALL_TABLES[name]) <= set(table.schema):
            raise DamageError(f"{name}.parquet in {self.uri} has other columns than a table of {name}: {VERIFY_HINT}")
        return table

    def _missing(self, name: str) -> pa.Table:
        """Returns what stands for a table that is not there."""
        return ALL_TABLES[name].empty_table()


VERIFY_HINT = "`rayfl verify` says what else is wrong; the command that started the run writes its tables again"


def content_of(storage: Storage) -> Mapping[str, Any]:
    """The resolved configuration of a finished or stopped run.

    Args:
        storage: the run's folder.

    Raises:
        RunError: it is no run's folder.
        DamageError: config.yaml is damaged.
    """
    shown = _shown(storage)
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


def _shown(storage: Storage) -> str:
    return redact(str(storage.local_path or storage.uri).rstrip("/"))
