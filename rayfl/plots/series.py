"""Groups runs into the series of a figure: repetitions with other seeds are one series, with a short label."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfl.config.added import comparable
from rayfl.config.differences import varied
from rayfl.config.identity import FREE
from rayfl.config.labels import labels
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ConfigError, RunError
from rayfl.runs.curves import mean_over_seeds
from rayfl.runs.definitions import defined_apart
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


def experiments(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Returns the experiment of each run.

    Where the files of one data set have changed between the runs, each has the beginning of its samples' checksum.
    """
    known: dict[str, set[str]] = {}
    for run in runs:
        if run.content_hash is not None:
            known.setdefault(_described(run), set()).add(run.content_hash)
    return [
        experiment(run)
        | ({"samples": (run.content_hash or "unknown")[:8]} if len(known.get(_described(run), ())) > 1 else {})
        for run in runs
    ]


def _described(run: RunFolder) -> str:
    """Returns what says which samples a run has; a function of users may draw others for each seed."""
    dataset = _data(run)["dataset"]
    seed = run.config.seed if dataset["name"] == "custom" else None
    return json.dumps([dataset, run.content.get("task"), seed], sort_keys=True)


_DATA = ("dataset", "partition", "long_tail", "holdout", "stages")
_PLACES = {"root", "manifest"}
"""Fields of a data set that say where it lies."""


def series_of(runs: Sequence[RunFolder], pooled: bool = True) -> list[Series]:
    """Returns the runs as series, in the order given.

    Args:
        runs: any.
        pooled: whether numbers of a series' runs are drawn together, and not each run for itself.

    Raises:
        ConfigError: when two runs have all in common, the seed too.
        RunError: when runs whose numbers are to be pooled are at different rounds.
    """
    groups: dict[str, list[RunFolder]] = {}
    for run, content in zip(runs, experiments(runs), strict=True):
        groups.setdefault(json.dumps(content, sort_keys=True), []).append(run)
    for members in groups.values():
        seeds = [run.config.seed for run in members]
        if len(set(seeds)) < len(seeds):
            names = " and ".join(run.uri for run in members)
            raise ConfigError(f"{names} are one experiment with one seed: give one of them, or runs with other seeds")
        if pooled:
            _need_one_round(members)
    first = [members[0] for members in groups.values()]
    return [Series(label, tuple(members)) for label, members in zip(_labels(first), groups.values(), strict=True)]


def need_alike(every: Sequence[Series], metrics: Iterable[str]) -> None:
    """Makes sure that the evaluations of a series' runs can be pooled, those before the last round, too.

    Args:
        every: the series.
        metrics: that are drawn.

    Raises:
        ConfigError: runs of a series score other numbers of clients, or define a metric in other ways.
    """
    shown = {metric: metric for metric in metrics}
    for series in every:
        counts = dict.fromkeys(run.config.evaluation.clients for run in series.runs)
        differing = [f"evaluation.clients ({', '.join(map(str, counts))})"] if len(counts) > 1 else []
        differing += defined_apart([run.content for run in series.runs], shown)
        if differing:
            raise ConfigError(
                f"{' and '.join(run.uri for run in series.runs)} are one series, and cannot be pooled, as they differ "
                f"in {', '.join(differing)}: draw them apart"
            )


def _need_one_round(runs: Sequence[RunFolder]) -> None:
    least, most = (end(runs, key=lambda run: run.rounds_completed) for end in (min, max))
    if least.rounds_completed < most.rounds_completed:
        instead = (
            "leave one out"
            if least.finished
            else f"finish the first (rayfl run {shlex.quote(least.uri)}), or leave it out"
        )
        raise RunError(
            f"{least.uri} has done {least.rounds_completed} of {least.total_rounds} rounds, and {most.uri}, with "
            f"another seed, {most.rounds_completed}: their numbers are of different rounds; {instead}"
        )


def fields_that_differ(runs: Iterable[RunFolder]) -> list[str]:
    """Returns the dotted paths in which the runs are different experiments."""
    return list(varied(experiments(list(runs))))


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
    """Returns each method's name as papers print it, with the options in which runs that share it differ.

    Those of the data are there, too, where methods differ in them.
    """
    methods, contents = [run.printed for run in runs], experiments(runs)
    shown = [
        _data(run) | {key: content[key] for key in ("samples",) if key in content}
        for run, content in zip(runs, contents, strict=True)
    ]
    result = []
    for place, (method, of_data) in enumerate(zip(methods, labels(shown), strict=True)):
        rivals = [other for other, name in enumerate(methods) if name == method]
        values = labels([contents[other] for other in rivals])[rivals.index(place)]
        further = of_data if len(rivals) < len(runs) else []
        result.append(", ".join(dict.fromkeys([method, *values, *further])))
    return result


def _data(run: RunFolder) -> dict[str, Any]:
    content = comparable(run.content)
    sections = {key: content[key] for key in _DATA if key in content}
    if isinstance(dataset := sections["dataset"], Mapping):
        sections["dataset"] = {key: value for key, value in dataset.items() if key not in _PLACES}
    held_out = run.config.evaluation.unseen_clients
    return sections | ({"evaluation": {"unseen_clients": held_out}} if held_out else {})
