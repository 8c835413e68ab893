"""A run's folder, opened for reading: its configuration, tables, times and commits."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from rayfl.config.loading import as_recorded, load_config, overrides_given
from rayfl.config.own_code import NamedMethod, named_code, refuse_code
from rayfl.config.plain_yaml import read_yaml
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ConfigError, DamageError, RunError
from rayfl.experiment.parts import Parts
from rayfl.results.personalized import PersonalizedRows, personalized_rows_of, recorded_clients
from rayfl.results.schemas import PARTITION_KEY, TABLES, known_schema
from rayfl.storage.commits import FOLDER, CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import Manifest, manifest_name
from rayfl.tracking.timings import read_timings


@dataclass(frozen=True)
class RunFolder:
    """What a run left.

    Attributes:
        storage: the folder.
        config: its configuration, with the folder's present place in ``storage_path`` and ``name``: it may have been
            moved since.
        trusted: whether code that the configuration names may be imported.
    """

    storage: Storage
    config: ExperimentConfig
    trusted: bool = False

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.config.run_name

    @cached_property
    def rounds(self) -> pa.Table:
        """Summaries over clients, schema ``rayfl.results.schemas.ROUNDS_SCHEMA``; raises RunError when there are
        none."""
        return self._table("rounds")

    @cached_property
    def clients(self) -> pa.Table:
        """One row per client, schema ``rayfl.results.schemas.CLIENTS_SCHEMA``; raises RunError when there are none."""
        return self._table("clients")

    @cached_property
    def own(self) -> PersonalizedRows:
        """Which rows are the method's personalized model.

        Raises:
            RunError: nobody knows, in a run of a user's own method that an older rayfl made.
        """
        method = self.config.algorithm
        known = None if isinstance(method, NamedMethod) else method
        return personalized_rows_of(self.rounds, known, self.storage.uri, method.name)

    @cached_property
    def num_clients(self) -> int | None:
        """K; None for runs of before the tables said it."""
        return recorded_clients(self.rounds)

    @cached_property
    def skipped(self) -> pa.Table:
        """Clients that were left out; empty in runs from before there was this table."""
        return self._table("skipped") if self.storage.exists("skipped.parquet") else TABLES["skipped"].empty_table()

    @cached_property
    def timings(self) -> list[dict[str, float]]:
        """Seconds by phase, a mapping per round; raises RunError when there are none."""
        found = read_timings(self.storage)
        if not found:
            raise RunError(f"{self.storage.uri} has no timings.jsonl: the run ended before its first commit")
        return found

    @cached_property
    def store(self) -> CommitStore:
        """The run's commits."""
        return Parts(self.config).commits

    @cached_property
    def parts(self) -> Parts:
        """Data set, task and context, made from the configuration.

        Raises:
            RunError: when the data have changed since the run.
            ConfigError: when the configuration names code of users, and the run is not trusted.
        """
        if not self.trusted:
            refuse_code(named_code(self.config), self.storage.uri)
        parts = Parts(self.config)
        written = (self.clients.schema.metadata or {}).get(PARTITION_KEY, b"").decode()
        if written != parts.partition_hash:
            raise RunError(
                f"{self.storage.uri} was made on other data than its configuration gives now: the data set's files or "
                "the partition's file have changed. Restore them (rayfl data verify)"
            )
        return parts

    def kept(self) -> list[int]:
        """The rounds of the commits that are there, ascending."""
        return [int(name.removeprefix("manifest-").removesuffix(".json")) for name in self.store.manifests()]

    def manifest(self, rounds_completed: int | None = None) -> Manifest:
        """A commit, the newest whole one if no round is given.

        Raises:
            RunError: when it is not kept (any more), saying which are.
            DamageError: when it is damaged.
        """
        kept = self.kept()
        if rounds_completed is None:
            manifest = self.store.latest()
            if manifest is None:
                raise RunError(f"{self.storage.uri} has no commit yet: run it first")
            return manifest
        if rounds_completed not in kept:
            shown = ", ".join(map(str, kept)) or "none"
            raise RunError(
                f"{self.storage.uri}/{FOLDER} has no commit of round {rounds_completed}; kept are those of rounds: "
                f"{shown}. A run keeps storage.keep_commits={self.config.storage.keep_commits} commits, one every "
                f"storage.commit_every={self.config.storage.commit_every} rounds; with storage.keep_commits="
                f"{self.config.train.rounds} and storage.commit_every=1 it keeps all"
            )
        return self.store.read_manifest(manifest_name(rounds_completed))

    def _table(self, name: str) -> pa.Table:
        place = f"{name}.parquet in {self.storage.uri}"
        try:
            table = pq.read_table(io.BytesIO(self.storage.read(f"{name}.parquet")))
        except FileNotFoundError as error:
            raise RunError(f"{place} is missing: the run has not been committed yet, run it first") from error
        except (pa.ArrowException, OSError) as error:
            raise DamageError(f"{place} is damaged ({error}); `rayfl verify` says what else is") from error
        if not known_schema(name, table.schema):
            raise DamageError(f"{place} has other columns than a table of {name}")
        return table


def open_run(path: str, schema: type[ExperimentConfig], trust: bool = False) -> RunFolder:
    """Opens a run's folder.

    Args:
        path: a path or a URI (file, s3, gs).
        schema: the configuration class.
        trust: whether code that the run's configuration names (``module:name``) may be imported; without it, its tables
            can be read, but models and data that need such code cannot.

    Raises:
        RunError: when there is no run, or its configuration cannot be read.
    """
    storage = Storage(path.rstrip("/") or path)
    try:
        content = read_yaml(storage.read("config.yaml"))
        if not isinstance(content, dict):
            raise RunError(f"{storage.uri}/config.yaml is damaged: it has no sections")
        config = as_recorded(content, lambda known, values: load_config(schema, known, values, trust=trust))
    except FileNotFoundError as error:
        raise RunError(f"{storage.uri} is no run's folder: it has no config.yaml") from error
    except (yaml.YAMLError, ValueError, RecursionError, ConfigError) as error:
        raise RunError(f"{storage.uri}/config.yaml cannot be read: {error}") from error
    return RunFolder(storage, _moved(config, storage), trust)


def is_run_folder(source: object) -> bool:
    """Whether what is given in place of a configuration is the folder of a run: a URI, or a folder on a disk."""
    if not isinstance(source, str | Path):
        return False
    return "://" in str(source) or Path(source).expanduser().is_dir()


def reopened(
    path: str, schema: type[ExperimentConfig], overrides: Sequence[str] | Mapping[str, Any]
) -> ExperimentConfig:
    """The configuration of a run that is to go on where it lies, with other values for some options.

    Code that it names is imported.

    Args:
        path: the run's folder.
        schema: the configuration class.
        overrides: as for ``rayfl.config.loading.load_config``.

    Raises:
        RunError: when there is no run.
        ConfigError: when an override is wrong, or names another place.
    """
    given = dict(overrides_given(overrides))
    for option in ("name", "storage_path"):
        if option in given:
            raise ConfigError(
                f"{option} does not apply to a run that is there: {path} goes on where it lies; `rayfl fork` begins "
                "another run from it"
            )
    storage = Storage(path.rstrip("/") or path)
    try:
        content = read_yaml(storage.read("config.yaml"))
    except FileNotFoundError as error:
        raise RunError(f"{storage.uri} is no run's folder: it has no config.yaml") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RunError(f"{storage.uri}/config.yaml cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{storage.uri}/config.yaml is damaged: it has no sections")
    config = as_recorded(content, lambda known, values: load_config(schema, known, {**values, **given}))
    return _moved(config, storage)


def _moved(config: ExperimentConfig, storage: Storage) -> ExperimentConfig:
    """The configuration of the same run where it lies now."""
    local = storage.local_path
    if local is not None:
        return config.model_copy(update={"storage_path": str(local.parent), "name": local.name})
    address, mark, options = storage.uri.partition("?")
    parent, _, name = address.rpartition("/")
    return config.model_copy(update={"storage_path": f"{parent}{mark}{options}", "name": name})
