"""Groups runs into the series of a figure: repetitions with other seeds are one series, with a short label."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rayfl.config.differences import varied
from rayfl.config.identity import FREE
from rayfl.config.labels import labels
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ConfigError
from rayfl.runs.curves import mean_over_seeds
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
        """Returns the configuration of the first run."""
        return self.runs[0].config


def experiment(run: RunFolder) -> dict[str, Any]:
    """Returns the sections that make an experiment another one: all but the seed, places, processes and evaluation."""
    found = {key: value for key, value in run.content.items() if key not in _OF_ONE_EXPERIMENT}
    held_out = run.config.evaluation.unseen_clients
    return found | ({"evaluation": {"unseen_clients": held_out}} if held_out else {})


def series_of(runs: Sequence[RunFolder]) -> list[Series]:
    """Returns the runs as series, in the order given.

    Raises:
        ConfigError: when two runs have all in common, the seed too.
    """
    groups: dict[str, list[RunFolder]] = {}
    for run in runs:
        groups.setdefault(json.dumps(experiment(run), sort_keys=True), []).append(run)
    for members in groups.values():
        seeds = [run.config.seed for run in members]
        if len(set(seeds)) < len(seeds):
            names = " and ".join(run.uri for run in members)
            raise ConfigError(f"{names} are one experiment with one seed: give one of them, or runs with other seeds")
    first = [members[0] for members in groups.values()]
    return [Series(label, tuple(members)) for label, members in zip(_labels(first), groups.values(), strict=True)]


def fields_that_differ(runs: Iterable[RunFolder]) -> list[str]:
    """Returns the dotted paths in which the runs are different experiments."""
    return list(varied([experiment(run) for run in runs]))


def need_methods(runs: Sequence[RunFolder], names: Sequence[str], kind: str) -> None:
    """Raises ConfigError, naming it, for a run of another method than these."""
    for run in runs:
        if run.config.algorithm.name not in names:
            raise ConfigError(
                f"{run.uri} is a run of {run.config.algorithm.name}; {kind} is of runs with algorithm="
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


def seeds_together(curves: Sequence[dict[int, float]]) -> dict[int, tuple[float, float]]:
    """Returns mean and sample standard deviation over curves by the rounds that all of them have; nan of one curve."""
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    found = [mean_over_seeds([curve[round] for curve in curves]) for round in shared]
    return {round: (float(mean), float(spread)) for round, (mean, spread) in zip(shared, found, strict=True)}


def _labels(runs: Sequence[RunFolder]) -> list[str]:
    """Returns each method's name as papers print it, with the options in which runs that share it differ."""
    methods = [run.printed for run in runs]
    result = []
    for run, method in zip(runs, methods, strict=True):
        rivals = [other for other, name in zip(runs, methods, strict=True) if name == method]
        values = labels([experiment(other) for other in rivals])[rivals.index(run)]
        result.append(", ".join([method, *values]))
    return result
