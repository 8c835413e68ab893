"""A run's folder with its configuration checked: what its tables say, and its data, models and commits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from rayfl.config.loading import as_recorded, load_config, overrides_given
from rayfl.config.own_code import NamedMethod, named_code, refuse_code
from rayfl.config.plain_yaml import read_yaml
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ConfigError, RunError
from rayfl.experiment.parts import Parts
from rayfl.results.schemas import data_metadata, same_data
from rayfl.runs.loading import Run
from rayfl.storage.commits import FOLDER, CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import Manifest, manifest_name
from rayfl.storage.run_folder import CONFIG
from rayfl.tracking.timings import FILE as TIMINGS


class RunFolder(Run):
    """A run whose configuration is checked, so that its data, models and commits can be opened.

    Its tables must be there, and so must its times: without a commit there is nothing to look at.

    Args:
        storage: the folder.
        config: its configuration, with the folder's present place in ``storage_path`` and ``name``: it may have been
            moved since.
        trusted: whether code that the configuration names may be imported.
    """

    def __init__(self, storage: Storage, config: ExperimentConfig, trusted: bool = False) -> None:
        method = config.algorithm
        super().__init__(storage, config.model_dump(mode="json"), None if isinstance(method, NamedMethod) else method)
        self.config = config
        self.trusted = trusted

    @cached_property
    def timings(self) -> list[dict[str, float]]:
        """Seconds by phase, a mapping a round, by ascending round; raises RunError, saying why, when there are none."""
        found = self._lines(TIMINGS)
        if not found:
            why = "it was deleted" if self.store.manifests() else "the run ended before its first commit"
            raise RunError(f"{self.uri} has no timings.jsonl, so its seconds are not known: {why}")
        return found

    def _missing(self, name: str) -> pa.Table:
        if name in ("rounds", "clients"):
            raise RunError(
                f"{name}.parquet in {self.uri} is missing: the run has not been committed yet, or the file "
                "was deleted; `rayfl run` with its folder goes on, and writes it"
            )
        return super()._missing(name)

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
            refuse_code(named_code(self.config), self.uri)
        parts = Parts(self.config)
        self.check_data(parts)
        return parts

    def check_data(self, parts: Parts) -> None:
        """Raises RunError when the data have changed since the run; those of ``parts`` are what they are now."""
        now = data_metadata(parts.partition_hash, parts.dataset.content_hash())
        if not same_data(self.clients.schema.metadata, now):
            raise RunError(
                f"{self.uri} was made on other data than its configuration gives now: the data set's files or "
                "the partition's file have changed. Restore them (rayfl data verify)"
            )

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
                raise RunError(f"{self.uri} has no commit yet: run it first")
            return manifest
        if rounds_completed not in kept:
            shown = ", ".join(map(str, kept)) or "none"
            raise RunError(
                f"{self.uri}/{FOLDER} has no commit of round {rounds_completed}; kept are those of rounds: "
                f"{shown}. A run keeps storage.keep_commits={self.config.storage.keep_commits} commits, one every "
                f"storage.commit_every={self.config.storage.commit_every} rounds; with storage.keep_commits="
                f"{self.config.train.rounds} and storage.commit_every=1 it keeps all"
            )
        return self.store.read_manifest(manifest_name(rounds_completed))


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
    content = _recorded(storage)
    try:
        config = as_recorded(content, lambda known, values: load_config(schema, known, values, trust=trust))
    except (ValueError, RecursionError, ConfigError) as error:
        raise RunError(f"{storage.uri}/{CONFIG} cannot be read: {error}") from error
    return RunFolder(storage, _moved(config, storage), trust)


def is_run_folder(source: object) -> bool:
    """Returns whether what stands in place of a configuration is a run's folder: a URI, or a folder on a disk."""
    if not isinstance(source, str | Path):
        return False
    return "://" in str(source) or Path(source).expanduser().is_dir()


def reopened(
    path: str, schema: type[ExperimentConfig], overrides: Sequence[str] | Mapping[str, Any]
) -> ExperimentConfig:
    """Returns the configuration of a run that is to go on where it lies, with other values for some options.

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
    content = _recorded(storage)
    try:
        config = as_recorded(content, lambda known, values: load_config(schema, known, {**values, **given}))
    except ConfigError as error:
        if given:
            raise
        raise ConfigError(f"{storage.uri}/{CONFIG}: {error}") from error
    return _moved(config, storage)


def _recorded(storage: Storage) -> dict[str, Any]:
    """Returns the configuration that the folder has, as plain data."""
    try:
        content = read_yaml(storage.read(CONFIG))
    except FileNotFoundError as error:
        raise RunError(f"{storage.uri} is no run's folder: it has no {CONFIG}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RunError(f"{storage.uri}/{CONFIG} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"{storage.uri}/{CONFIG} is damaged: it has no sections")
    return content


def _moved(config: ExperimentConfig, storage: Storage) -> ExperimentConfig:
    """Returns the configuration of the same run where it lies now."""
    local = storage.local_path
    if local is not None:
        return config.model_copy(update={"storage_path": str(local.parent), "name": local.name})
    address, mark, options = storage.uri.partition("?")
    parent, _, name = address.rpartition("/")
    return config.model_copy(update={"storage_path": f"{parent}{mark}{options}", "name": name})
