"""Gives a run more rounds than it was begun with, where that makes no round another one."""

from __future__ import annotations

import hashlib
import logging
import shlex
from collections.abc import Callable
from typing import Any

from algorithms.base import Algorithm
from algorithms.registry import METHODS, Experiment
from cluster.rounds.early_stopping import EarlyStopping
from cluster.rounds.progress import check_same_data, empty_tables
from rayfl.config.loading import as_recorded, load_config, to_yaml
from rayfl.config.plain_yaml import read_yaml
from rayfl.errors import RunError
from rayfl.experiment.parts import Parts
from rayfl.storage.manifest import Manifest
from rayfl.storage.run_folder import CONFIG, input_digests
from rayfl.storage.tables import PartedTable, read_whole

_log = logging.getLogger("rayfl")


def extend(parts: Parts) -> list[str]:
    """Makes the run in a folder one of more rounds, if the configuration asks for that and for nothing else.

    Its commits and ``config.yaml`` say the new number of rounds afterwards, this file last: cut short, the same command
    does the rest. Call it only with the run's lease.

    Args:
        parts: of the configuration with the new number of rounds.

    Returns:
        What was done, a sentence; nothing where there is nothing to extend.

    Raises:
        RunError: when rounds that are done would have been others, or the run is an older rayfl's.
    """
    storage, config = parts.storage, parts.config
    if not storage.exists(CONFIG):
        return []
    stored = as_recorded(read_yaml(storage.read(CONFIG)), lambda known, values: load_config(Experiment, known, values))
    before, rounds = stored.train.rounds, config.train.rounds
    longer = stored.model_copy(update={"train": stored.train.model_copy(update={"rounds": rounds})})
    if rounds <= before or not longer.same_results(config):
        return []
    manifest = parts.commits.latest()
    done = 0 if manifest is None else manifest.rounds_completed
    if manifest is not None:
        _, recorded = PartedTable.restored(parts.commits, manifest, "rounds")
        check_same_data(recorded, empty_tables(parts), storage.uri)
    if manifest is not None:
        _check_goes_on(parts, manifest, before)
    _check_course(parts, before, done)
    _stamp(parts, {stored.fingerprint(), config.fingerprint()})
    written = to_yaml(config).encode()
    for place in (parts.copy, storage):
        if place is not None:
            place.write(CONFIG, written)
    return [f"{storage.uri} had {before} rounds, of which {done} are done, and has {rounds} now"]


def _check_goes_on(parts: Parts, manifest: Manifest, before: int) -> None:
    """Refuses where a run of more rounds would not have come further than this one."""
    config, uri, done = parts.config, parts.storage.uri, manifest.rounds_completed
    how = f"it has ended early, after round {done} of {before}" if manifest.ended_early else ""
    if not how and done == before and done % config.evaluation.every == 0:  # its last evaluation was to end nothing
        recorded = read_whole(parts.commits, manifest, "rounds").to_pylist()
        if why := EarlyStopping(config, parts.task.measures.metrics, recorded).why:
            how = f"a longer run would have ended early, after round {done}: {why}"
    if how:
        raise RunError(
            f"{uri} cannot be extended: {how} (early_stopping). Fork it with other options: rayfl fork "
            f"{shlex.quote(uri)} --name NAME 'early_stopping={{}}' train.rounds={config.train.rounds}"
        )


def _check_course(parts: Parts, before: int, done: int) -> None:
    """Refuses where a round that is done depends on how many there are; warns where nobody knows."""
    config, uri = parts.config, parts.storage.uri
    method, train, rounds = config.algorithm, config.train, config.train.rounds
    known: dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]] = {
        f"the learning rate (train.schedule={train.schedule.name})" if train.schedule else "the learning rate": (
            train.model_copy(update={"rounds": before}).lr_in,
            train.lr_in,
        ),
        f"the part of algorithm={method.name} that goes by train.rounds": (
            lambda round: method.course_of(parts.task, round, before),
            lambda round: method.course_of(parts.task, round, rounds),
        ),
    }
    for what, (old, new) in known.items():
        other = next((round for round in range(done) if old(round) != new(round)), None)
        if other is not None:
            raise RunError(
                f"{uri} cannot be extended from {before} to {rounds} rounds: {what} would have been another in round "
                f"{other + 1}, {new(other)} in place of {old(other)}, and {done} rounds are done. Begin another run "
                f"with train.rounds={rounds}, or fork this one with other options: rayfl fork {shlex.quote(uri)} "
                "--name NAME"
            )
    own = type(method).course is Algorithm.course and METHODS.get(method.name) is None
    if own and done:
        _log.warning(
            "%s does not say whether a round depends on train.rounds (Algorithm.course): if it reads context.rounds, "
            "the first %d rounds are those of a run of %d rounds",
            method.name,
            done,
            before,
        )


def _stamp(parts: Parts, known: set[str]) -> None:
    """Gives all commits the configuration's fingerprint.

    Raises:
        RunError: when a commit has another one than those that are known.
    """
    store, config = parts.commits, parts.config
    found = [entry.manifest for entry in store.survey(False, [])]
    strange = [manifest for manifest in found if manifest.fingerprint not in known]
    if strange:
        raise RunError(
            f"{parts.storage.uri} cannot be extended: the commit of round {strange[0].rounds_completed} is of another "
            "run, or of an older rayfl whose rounds would not go on as they began"
        )
    digests = {**input_digests(parts.storage), CONFIG: hashlib.sha256(to_yaml(config).encode()).hexdigest()}
    for manifest in found:
        inputs = {name: digests.get(name, digest) for name, digest in manifest.inputs.items()}
        changed = manifest.model_copy(update={"fingerprint": config.fingerprint(), "inputs": inputs})
        if changed != manifest:
            store.replace_manifest(changed)
