"""Runs as series of a figure: repetitions with other seeds are one series, and every series has a short label."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayfl.config.differences import flattened
from rayfl.config.identity import FREE
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ConfigError
from rayfl.runs.folder import RunFolder

_OF_ONE_EXPERIMENT = FREE | {"seed", "evaluation", "engine"}
"""Keys in which the runs of one series may differ."""


@dataclass(frozen=True)
class Series:
    """Runs that differ in their seeds only.

    Attributes:
        label: for the legend.
        runs: at least one.
    """

    label: str
    runs: tuple[RunFolder, ...]

    @property
    def config(self) -> ExperimentConfig:
        """The configuration of the first."""
        return self.runs[0].config


def experiment(run: RunFolder) -> dict[str, Any]:
    """Returns what makes an experiment another one: all values but the seed, places, processes and evaluation."""
    return {
        path: value
        for path, value in flattened(run.config).items()
        if path.partition(".")[0] not in _OF_ONE_EXPERIMENT or path == "evaluation.unseen_clients"
    }


def series_of(runs: Sequence[RunFolder]) -> list[Series]:
    """The runs as series, in the order given.

    Raises:
        ConfigError: when two runs have all in common, the seed too.
    """
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        groups.setdefault(json.dumps(experiment(run), sort_keys=True), []).append(run)
    for members in groups.values():
        seeds = [run.config.seed for run in members]
        if len(set(seeds)) < len(seeds):
            names = " and ".join(run.storage.uri for run in members)
            raise ConfigError(f"{names} are one experiment with one seed: give one of them, or runs with other seeds")
    first = [members[0] for members in groups.values()]
    return [Series(label, tuple(members)) for label, members in zip(_labels(first), groups.values(), strict=True)]


def fields_that_differ(runs: Iterable[RunFolder]) -> list[str]:
    """Dotted paths of what makes the runs other experiments."""
    contents = [experiment(run) for run in runs]
    paths = dict.fromkeys(path for content in contents for path in content)
    return [path for path in paths if len({_text(content.get(path)) for content in contents}) > 1]


def need_methods(runs: Sequence[RunFolder], names: Sequence[str], kind: str) -> None:
    """Raises ConfigError, naming it, for a run of another method than these."""
    for run in runs:
        if run.config.algorithm.name not in names:
            raise ConfigError(
                f"{run.storage.uri} is a run of {run.config.algorithm.name}; {kind} is of runs with algorithm="
                f"{' or '.join(names)}"
            )


def need_same_but(runs: Sequence[RunFolder], free: Sequence[str], kind: str) -> None:
    """Raises ConfigError when runs differ in other fields than these (and seeds)."""
    others = [path for path in fields_that_differ(runs) if path not in free]
    if others:
        raise ConfigError(
            f"{kind} compares runs that differ in {', '.join(free)} only; these differ in {', '.join(others)} as well "
            "(rayfl diff A B shows the values)"
        )


def over_seeds(curves: Sequence[dict[int, float]]) -> dict[int, tuple[float, float]]:
    """Mean and population standard deviation over curves by the rounds that all of them have."""
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {
        round: (float(np.mean(values)), float(np.std(values)))
        for round in shared
        for values in [[curve[round] for curve in curves]]
    }


def _labels(runs: Sequence[RunFolder]) -> list[str]:
    """The method, and where several runs have it, in what they differ."""
    methods = [run.config.algorithm.name.rpartition(":")[2] for run in runs]
    result = []
    for run, method in zip(runs, methods, strict=True):
        rivals = [other for other, name in zip(runs, methods, strict=True) if name == method]
        content = experiment(run)
        values = [f"{path.rpartition('.')[2]}={_text(content.get(path))}" for path in fields_that_differ(rivals)]
        result.append(", ".join([method, *values]))
    return result


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
