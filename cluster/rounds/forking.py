"""Begins a run from the commit of another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from algorithms.parts.settings import kept_settings
from algorithms.registry import Experiment
from cluster.rounds.claim import claim_folder
from rayfl.config.beginning import FILE as INITIAL
from rayfl.config.beginning import InitConfig
from rayfl.config.loading import as_recorded, load_config, overrides_given
from rayfl.config.plain_yaml import read_yaml
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ConfigError, RunError
from rayfl.experiment.parts import Parts
from rayfl.params import leaves
from rayfl.runs.folder import RunFolder, open_run
from rayfl.storage.commit_files import CommitFiles
from rayfl.storage.lease import Lease
from rayfl.storage.manifest import ENDED_EARLY, Manifest, with_checksum
from rayfl.storage.run_folder import check_run_folder, input_digests
from rayfl.tracking.costs import FILE as COSTS
from rayfl.tracking.costs import read_costs
from rayfl.tracking.environment import FILE as ENVIRONMENT
from rayfl.tracking.environment import environment_file, starts_before
from rayfl.tracking.timings import FILE as TIMINGS
from rayfl.tracking.timings import read_timings

_FIXED = (
    "seed",
    "dataset",
    "transform",
    "partition",
    "long_tail",
    "holdout",
    "noise",
    "labelled",
    "stages",
    "task",
    "model",
    "system",
)
_FIXED_OF_TRAIN = ("optimizer", "optimizer_options", "persist_optimizer", "private_norm")
"""Options that decide the shape of states and tables and the samples of clients: a fork cannot change them."""


def fork(
    path: str, name: str, round: int | None, overrides: Sequence[str] | Mapping[str, Any]
) -> tuple[ExperimentConfig, int]:
    """Makes the folder of a run that continues from a commit of another run, which is not changed.

    If it was interrupted, the same command completes it.

    Args:
        path: folder of the other run.
        name: name of the new run.
        round: completed rounds of the commit; None for the newest.
        overrides: options of the new run, such as another ``train.lr`` from here on.

    Returns:
        The configuration of the new run, and the round after which it begins.

    Raises:
        ConfigError: when an override is wrong, or does not fit the states of the other run.
        RunError: when there is no such commit, or the new folder holds another run.
    """
    source = open_run(path, Experiment, trust=True)
    manifest = source.manifest(round)
    config = _config(source, manifest, name, overrides_given(overrides))
    parts = Parts(config)
    parts.check()
    _check_same(source, parts)
    check_run_folder(parts.storage, parts.copy)
    with Lease(parts.storage, config.storage.lease_timeout_s) as lease:
        if parts.commits.manifests():
            raise RunError(f"{parts.storage.uri} is a run already: choose another --name")
        if source.storage.exists(INITIAL):
            parts.storage.write(INITIAL, source.storage.read(INITIAL))
        claim_folder(parts)
        files = CommitFiles(parts.storage, parts.copy)
        for file in manifest.stored():
            files.write(file.name, source.store.read(file))
        lines = [line for line in read_timings(source.storage) if line["round"] <= manifest.rounds_completed]
        parts.storage.write(TIMINGS, "".join(f"{json.dumps(line)}\n" for line in lines).encode())
        costs = [line for line in read_costs(source.storage) if line["round"] <= manifest.rounds_completed]
        parts.storage.write(COSTS, "".join(f"{json.dumps(line)}\n" for line in costs).encode())
        starts = starts_before(source.environment, manifest.rounds_completed)
        parts.storage.write(ENVIRONMENT, environment_file(starts))
        lease.check()
        counters = {name: count for name, count in manifest.counters.items() if name != ENDED_EARLY}
        own = {"fingerprint": config.fingerprint(), "inputs": input_digests(parts.storage), "counters": counters}
        parts.commits.write_manifest(manifest.model_copy(update=own))
    return config, manifest.rounds_completed


def _config(source: RunFolder, manifest: Manifest, name: str, given: Sequence[tuple[str, Any]]) -> ExperimentConfig:
    wanted = dict(given)
    for path in wanted:
        if path == "name" or path.partition(".")[0] == "init":
            raise ConfigError(f"{path}: a fork's name is --name, and it begins from the run that is forked")
    digest = hashlib.sha256(json.dumps(with_checksum(manifest), sort_keys=True).encode()).hexdigest()
    init = {"from": source.storage.uri, "round": manifest.rounds_completed, "what": "commit", "sha256": digest}
    new = {"storage_path": source.config.storage_path, **wanted, "name": name, "init": init}
    content = read_yaml(source.storage.read("config.yaml"))
    config = as_recorded(content, lambda known, values: load_config(Experiment, known, {**values, **new}))
    changed = [path for path in _FIXED if getattr(config, path) != getattr(source.config, path)]
    changed += [f"train.{o}" for o in _FIXED_OF_TRAIN if getattr(config.train, o) != getattr(source.config.train, o)]
    if (config.attack.backdoor is None) != (source.config.attack.backdoor is None):
        changed.append("attack.backdoor")  # with one tables have a column more
    if (config.evaluation.adversarial is None) != (source.config.evaluation.adversarial is None):
        changed.append("evaluation.adversarial")  # the same
    if config.privacy != source.config.privacy:
        changed.append("privacy")
    if config.privacy.on:  # epsilon is that of equal rounds
        sampled = ("clients_per_round", "min_clients_per_round", "sampling")
        changed += [f"train.{o}" for o in sampled if getattr(config.train, o) != getattr(source.config.train, o)]
    if config.privacy.distributed and config.compression != source.config.compression:  # equal levels, too
        changed.append("compression")
    if config.privacy.of_examples:  # epsilon is that of rounds with equal steps
        steps = ("batch_size", "local_epochs", "min_local_steps", "max_local_steps")
        counted = ("clients_per_round", "min_clients_per_round", "sampling", *steps)
        changed += [f"train.{o}" for o in counted if getattr(config.train, o) != getattr(source.config.train, o)]
        if config.algorithm != source.config.algorithm:
            changed.append("algorithm")
    if config.evaluation.unseen_clients != source.config.evaluation.unseen_clients:
        changed.append("evaluation.unseen_clients")
    if config.algorithm.name != source.config.algorithm.name:
        changed.append("algorithm")
    else:
        kept = kept_settings(source.config.algorithm, config.algorithm, manifest.rounds_completed)
        changed += [f"algorithm.{name}" for name in kept]
    if changed:
        raise ConfigError(
            f"{', '.join(changed)}: a fork goes on with the clients, models and states of {source.storage.uri}, so "
            "this cannot be another; `rayfl run ... init.from=RUN` begins from its model alone"
        )
    if config.train.rounds <= manifest.rounds_completed:
        raise ConfigError(
            f"train.rounds={config.train.rounds}, but the fork begins after round {manifest.rounds_completed}: set "
            "train.rounds to more, or --round to less"
        )
    assert isinstance(config.init, InitConfig)
    return config


def _check_same(source: RunFolder, parts: Parts) -> None:
    """Refuses other data, and hyper-parameters that give the server another tree."""
    source.check_data(parts)
    old, new = (_shapes(one) for one in (Parts(source.config), parts))
    if old != new:
        where = ", ".join(sorted({path for path, _ in old.items() ^ new.items()})[:3])
        raise ConfigError(
            f"algorithm: with these options the server's tree is another than in {source.storage.uri} ({where}); "
            "a fork cannot change them"
        )


def _shapes(parts: Parts) -> dict[str, Any]:
    """Returns the shapes of the server's tensors before round 0, and its plain values."""
    found = leaves(parts.initial_server())
    return {path: tuple(value.shape) if isinstance(value, Tensor) else value for path, value in found}
