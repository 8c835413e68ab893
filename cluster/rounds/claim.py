"""Claims a folder for an experiment: writes its configuration, or checks that it holds the same experiment."""

from __future__ import annotations

import hashlib
import io
import logging
import shlex
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from algorithms.registry import Experiment
from rayfl.config.beginning import FILE as INITIAL
from rayfl.config.beginning import initial_file
from rayfl.config.identity import FREE
from rayfl.config.loading import as_recorded, load_config, to_yaml
from rayfl.config.plain_yaml import read_yaml, write_yaml
from rayfl.config.removed import removed_from
from rayfl.data.partitions.assignment import assignment_hash, to_parquet
from rayfl.errors import DamageError, RunError
from rayfl.experiment.copies import copy_of, settings_of, share_beginning, share_commits
from rayfl.experiment.parts import Parts
from rayfl.storage.commits import FOLDER, CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.run_folder import CONFIG, remove_leftovers
from rayfl.storage.tables import from_parquet
from rayfl.storage.tables import to_parquet as table_to_parquet
from rayfl.system.devices import devices_table

_PARTITION, _DEVICES = "partition.parquet", "devices.parquet"

_log = logging.getLogger("rayfl")


def claim_folder(parts: Parts) -> list[str]:
    """Writes ``config.yaml``, or checks that the run in the folder is this one. The caller must hold the run's lease.

    Returns:
        A sentence for each file that was restored from its copy.

    Raises:
        RunError: when the folder, or that of its copies, holds another run, or a run on other data or devices.
        DamageError: when a file that identifies the run is damaged.
    """
    storage, config, copy = parts.storage, parts.config, parts.copy
    for place in (storage, copy):
        if place is not None:
            remove_leftovers(place, config.storage.lease_timeout_s)
    foreign = parts.commits.foreign()
    if foreign:
        _log.warning("%s/%s has files that rayfl leaves alone: %s", storage.uri, FOLDER, ", ".join(foreign))
    known = [place for place in (storage, copy) if place is not None and place.exists(CONFIG)]
    if known:
        # A damaged configuration is restored from the other folder.
        _check_same_run(min(known, key=lambda place: not _is_right(parts, CONFIG, place.read(CONFIG))), parts)
        restored = []
        if copy is not None:
            _renew(storage, copy)
            restored = share_beginning(storage, copy, partial(_is_right, parts))
        _check_same_inputs(storage, parts)
        if copy is not None:
            restored += share_commits(storage, copy)
        _record_copies(parts)
        return restored
    storage.write(_PARTITION, to_parquet(parts.assignment))
    if parts.devices:
        storage.write(_DEVICES, table_to_parquet(devices_table(parts.devices)))
    if config.init.source is not None and config.init.what == "model":
        storage.write(INITIAL, initial_file(config.init, storage))
    storage.write(CONFIG, to_yaml(config).encode())
    if copy is not None:
        share_beginning(storage, copy, partial(_is_right, parts))
    return []


def _renew(storage: Storage, copy: Storage) -> None:
    """Renews ``config.yaml`` of copies that had paused: it lacks what became of the section ``storage`` and rounds."""
    with suppress(FileNotFoundError, yaml.YAMLError, ValueError, TypeError, LookupError, RecursionError):
        mine, other = (read_yaml(place.read(CONFIG)) for place in (storage, copy))
        fewer = other["train"]["rounds"] <= mine["train"]["rounds"]
        since = {"storage": mine["storage"], "train": {**other["train"], "rounds": mine["train"]["rounds"]}}
        if fewer and other != mine and {**other, **since} == mine:
            copy.write(CONFIG, storage.read(CONFIG))


def _record_copies(parts: Parts) -> None:
    """Writes the section ``storage`` to ``config.yaml`` where copies changed: other commands find them by it.

    Commits come to have its new checksum, and the file is written last: cut short, the same command does the rest.
    """
    storage, wanted = parts.storage, parts.config.storage
    known = settings_of(storage)
    if (known.copies, known.copies_path) == (wanted.copies, wanted.copies_path):
        return
    before = copy_of(storage, known, parts.config.run_name)
    if before is not None:
        _log.warning("%s gets no more copies of this run: storage.copies or copies_path is another now", before.uri)
    content = {**read_yaml(storage.read(CONFIG)), "storage": wanted.model_dump(mode="json")}
    written = write_yaml(content).encode()
    digest = hashlib.sha256(written).hexdigest()
    for manifest in [entry.manifest for entry in parts.commits.survey(False, [])]:
        if CONFIG in manifest.inputs:
            inputs = {**manifest.inputs, CONFIG: digest}
            parts.commits.replace_manifest(manifest.model_copy(update={"inputs": inputs}))
    for place in (parts.copy, storage):
        if place is not None:
            place.write(CONFIG, written)


def _is_right(parts: Parts, name: str, data: bytes) -> bool:
    """Returns whether a file that identifies a run belongs to this one."""
    try:
        if name == CONFIG:
            return isinstance(read_yaml(data), dict)
        if name == INITIAL:
            init = parts.config.init
            return init.what == "commit" or hashlib.sha256(data).hexdigest() == init.sha256
        table = pq.read_table(io.BytesIO(data))
        if name == _PARTITION:
            return assignment_hash(table) == parts.partition_hash
        return bool(table.equals(devices_table(parts.devices)))
    except (yaml.YAMLError, pa.ArrowException, OSError, KeyError, ValueError, RecursionError):
        return False


def _check_same_run(place: Storage, parts: Parts) -> None:
    try:
        content = read_yaml(place.read(CONFIG))
        stored = as_recorded(content, lambda known, values: load_config(Experiment, known, values))
    except Exception as error:
        raise RunError(f"{place.uri}/{CONFIG} cannot be read ({error}); choose another name") from error
    if gone := removed_from(content):
        values = ", ".join(f"{path}={value}" for path, value in gone.items())
        raise RunError(f"{place.uri} was begun with {values}, which rayfl no longer has: choose another name")
    if not stored.same_results(parts.config):
        changes = _differences(stored.model_dump(mode="json"), parts.config.model_dump(mode="json"))
        longer = len(changes) == 1 and stored.train.rounds < (rounds := parts.config.train.rounds)
        longer = longer and not CommitStore(place).ended_early()  # more rounds would be refused
        more = f". `rayfl run {shlex.quote(place.uri)} train.rounds={rounds}` gives it more rounds" if longer else ""
        raise RunError(
            f"{place.uri} holds another run: {'; '.join(changes)}. Choose another name, or restore these values{more}"
        )


def _check_same_inputs(storage: Storage, parts: Parts) -> None:
    if storage.exists(_PARTITION) and _partition_hash(storage) != parts.partition_hash:
        raise RunError(
            f"{storage.uri}/{_PARTITION} says that the run began with other data than the configuration gives now: the "
            "data set's files or the partition's file have changed. Restore them, or choose another name"
        )
    known = bool(parts.devices) and storage.exists(_DEVICES)
    if known and not _written_devices(storage).equals(devices_table(parts.devices)):
        raise RunError(
            f"{storage.uri}/{_DEVICES} says that the run began with other devices than system gives now: the trace's "
            "files have changed. Restore them, or choose another name"
        )


def _partition_hash(storage: Storage) -> str:
    try:
        return assignment_hash(pq.read_table(io.BytesIO(storage.read(_PARTITION))))
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DamageError(
            f"{storage.uri}/{_PARTITION} is damaged ({error}): restore it, or delete it, and the same command writes "
            "it again"
        ) from error


def _written_devices(storage: Storage) -> pa.Table:
    try:
        return from_parquet(storage.read(_DEVICES))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamageError(
            f"{storage.uri}/{_DEVICES} is damaged ({error}): restore it, or delete it, and the devices are those that "
            "the configuration gives now"
        ) from error


def _differences(old: Any, new: Any, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in {**old, **new}
            if _counts(inner := f"{path}.{key}" if path else key)
            for line in _differences(old.get(key), new.get(key), inner)
        ]
    return [] if old == new else [f"{path} was {old!r}, now {new!r}"]


def _counts(path: str) -> bool:
    section, _, option = path.partition(".")
    return section not in FREE or (section == "cluster" and option in ("", "threads_per_actor"))
