"""Options that are younger than the first release, and what they change in a run's identity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from rayfl.config.differences import ABSENT as LEFT_OUT

ADDED: Mapping[str, Any] = {
    "algorithm.adapters": "factors",
    "algorithm.one_sample": "paper",
    "algorithm.simplex_over": "head",
    "aggregator": {"name": "mean"},
    "attack": {
        "share": 0.0,
        "clients": None,
        "labels": "honest",
        "message": "honest",
        "strength": None,
        "backdoor": None,
        "perturbation": None,
    },
    "attack.backdoor": None,
    "attack.perturbation": None,
    "augment.blur": 0.0,
    "augment.cutout": 0.0,
    "augment.foreground": 0.0,
    "augment.grayscale": 0.0,
    "augment.jitter": 0.0,
    "augment.operations": 0,
    "augment.patch": None,
    "augment.resized_crop": 1.0,
    "compression": {"name": "none"},
    "contribution": {"name": "none"},
    "dataset.group": None,
    "dataset.ignore": None,
    "dataset.labels": "as_found",
    "stages": {"name": "none"},
    "system.concurrency": None,
    "system.mode": "synchronous",
    "dataset.kind": "auto",
    "dataset.length": None,
    "dataset.missing": "error",
    "dataset.padding": 0,
    "dataset.standardize": "none",
    "dataset.target": "auto",
    "dataset.tokenizer": None,
    "dataset.vocabulary": None,
    "early_stopping": {
        "patience": None,
        "min_delta": 0.0,
        "target": None,
        "metric": None,
        "model": "personalized",
        "min_rounds": 0,
    },
    "engine.capture": False,
    "engine.compile": False,
    "evaluation.adversarial": None,
    "evaluation.clients": "all",
    "evaluation.official_personalized": False,
    "evaluation.unseen_clients": 0.0,
    "evaluation.unseen_epochs": None,
    "labelled": {"share": 1.0, "per_class": None, "at": "clients"},
    "model.adapter.use_dora": False,
    "long_tail": {"imbalance_factor": 1.0, "order": "classes", "balanced_test": 0, "official_test": "as_is"},
    "model.factorize": None,
    "model.padding": 2,
    "model.projection": None,
    "model.prompt": None,
    "noise.clients": 1.0,
    "partition.by": "class",
    "partition.classes_per_client": None,
    "partition.iid_share": None,
    "privacy": {
        "clip_norm": None,
        "noise_multiplier": 0.0,
        "delta": None,
        "target_quantile": None,
        "clip_lr": 0.2,
        "count_noise": None,
        "example_clip_norm": None,
        "example_noise_multiplier": 0.0,
        "example_delta": None,
        "noise": "independent",
        "tree_rounds": None,
        "bands": None,
        "noise_at": "server",
        "accountant": "rdp",
        "mechanism": "gaussian",
    },
    "privacy.accountant": "rdp",
    "privacy.bands": None,
    "privacy.clip_lr": 0.2,
    "privacy.count_noise": None,
    "privacy.example_clip_norm": None,
    "privacy.example_delta": None,
    "privacy.example_noise_multiplier": 0.0,
    "privacy.mechanism": "gaussian",
    "privacy.noise": "independent",
    "privacy.noise_at": "server",
    "privacy.target_quantile": None,
    "privacy.tree_rounds": None,
    "selection": {"name": "uniform"},
    "task": {
        "name": "classification",
        "metrics": [],
        "thresholds": 101,
        "frequency": "share",
        "frequency_bounds": None,
    },
    "task.frequency": "share",
    "task.frequency_bounds": None,
    "train.betas": [0.9, 0.999],
    "train.dampening": 0.0,
    "train.drop_last": False,
    "train.eps": 1e-8,
    "train.max_local_steps": None,
    "train.min_clients_per_round": None,
    "train.nesterov": False,
    "train.optimizer": "sgd",
    "train.optimizer_options": {},
    "train.sampling": "fixed",
    "train.schedule": None,
    "train.shuffle": True,
    "train.straggler_epochs": 1,
    "train.stragglers": 0.0,
}
"""By dotted path, the value (as in a file) that stands for what was done before there was the option.

At that value an option does not count in the fingerprint, so that runs from before continue. A default that does
something else than was done before is not that value, and counts.
"""

COUNTED: Mapping[str, Any] = {"engine.precision": "float32"}
"""Options that count in every fingerprint (``rayfl.config.identity``): what a record is about that lacks them."""


def values_of_before(recorded: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns by dotted path the options of :data:`ADDED` that a configuration has and its record does not.

    A run's ``config.yaml`` has all options that there were: what it lacks came later, and the run has done what was
    done before.

    Args:
        recorded: the content of ``config.yaml``.
        resolved: the configuration that it gives today, as plain data.
    """
    return {
        path: before
        for path, before in ADDED.items()
        if value_at(resolved, path) is not ABSENT and value_at(recorded, path) is ABSENT
    }


def changed_defaults(config: BaseModel) -> dict[str, Any]:
    """Returns by dotted path the earlier values of options at their defaults, where the defaults now mean another."""
    found = {}
    for path, before in ADDED.items():
        *parents, key = path.split(".")
        section: Any = config
        for parent in parents:
            section = getattr(section, parent, None)
        field = type(section).model_fields.get(key) if isinstance(section, BaseModel) else None
        if (
            field is not None
            and getattr(section, key) == field.default
            and section.model_dump(mode="json")[key] != before
        ):
            found[path] = before
    return found


def without(content: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Returns a plain configuration without some options, by their dotted paths; those it does not have are ignored."""
    left = dict(content)
    for path in paths:
        key, _, rest = path.partition(".")
        if rest and isinstance(left.get(key), Mapping):
            left[key] = without(left[key], [rest])
        elif not rest:
            left.pop(key, None)
    return left


def without_added(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plain configuration without the options of :data:`ADDED` that are at the value of before."""
    return _without_values(content, ADDED)


def _without_values(content: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plain configuration without options that have certain values; in a model's candidates as in a model."""
    left = without(content, [path for path, value in values.items() if value_at(content, path) == value])
    candidates = value_at(left, "model.candidates")
    if isinstance(candidates, list):
        of_models = {path: value for path, value in values.items() if path.startswith("model.")}
        known = [_without_values({"model": candidate}, of_models)["model"] for candidate in candidates]
        left["model"] = {**left["model"], "candidates": known}
    return left


def comparable(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a ``config.yaml`` such that all versions of rayfl have the same for one experiment."""
    left = _without_values(recorded, {**ADDED, **COUNTED})
    return left if value_at(recorded, "init.from") not in (None, ABSENT) else without(left, ["init"])


_BY_NAME = ("algorithm", "dataset", "model", "partition", "task")
"""Sections whose options depend on their name: one that is not there need not be at the value of before."""


def values_told(found: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Returns what :func:`rayfl.config.differences.varied` has found in comparable contents, with values of before.

    :func:`comparable` leaves these out, and a reader is told them: ``evaluation.clients=all``.
    """
    told = {}
    for path, values in found.items():
        section, _, rest = path.partition(".")
        before = ADDED.get(path, value_at(ADDED.get(section, {}), rest))
        known = section not in _BY_NAME and before is not ABSENT and before is not None
        told[path] = [before if known and value == LEFT_OUT else value for value in values]
    return told


ABSENT = object()
"""Stands for the value of an option that is not there."""


def value_at(content: Any, path: str) -> Any:
    """Returns the value at a dotted path of plain data; :data:`ABSENT` if there is none."""
    for key in path.split("."):
        if not isinstance(content, Mapping) or key not in content:
            return ABSENT
        content = content[key]
    return content
