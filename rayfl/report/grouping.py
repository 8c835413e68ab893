"""Groups runs that differ in nothing but the seed, and refuses to compare runs on different data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from rayfl.config.added import comparable, values_told
from rayfl.config.differences import ABSENT, text_of, varied
from rayfl.config.identity import FREE
from rayfl.config.labels import labels
from rayfl.config.redaction import redacted
from rayfl.data.partitions.stage import NoStages
from rayfl.data.partitions.stages import recorded_stages
from rayfl.errors import RunError
from rayfl.runs.loading import Run
from rayfl.runs.rows import final_rows

_DATA = ("dataset", "partition", "long_tail", "holdout")
_ARRIVALS, _DRIFTS = ("classes", "domains"), ("rotation", "labels")
"""Kinds of stages whose test samples are not all there, or are others than those of the source, from some stage on."""
_NOT_OF_TESTS = {"count", "rounds", "memory"}
"""Options of stages that have no part in which test samples there are in a stage, and what they are like."""
_PLACES = {"root", "path", "manifest"}
"""Fields of a data set that say where it lies."""

_SEEN = {
    *("x", "shape", "kind", "labels", "num_classes", "missing", "standardize", "side"),
    *("tokenizer", "tokenizer_sha256", "length", "vocabulary", "padding", "template", "response", "end"),
}
"""Fields of data in files that say how a model sees samples, and not which samples there are."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one configuration, by seed.

    Attributes:
        label: the method, and where several groups share it what tells them apart.
        runs: by ascending seed.
    """

    label: str
    runs: Sequence[Run]

    @property
    def printed(self) -> str:
        """Returns the label with the method's name as papers print it."""
        return self.runs[0].printed + self.label.removeprefix(self.runs[0].title)

    @property
    def finished(self) -> bool:
        """Returns whether all rounds of its runs are done."""
        return all(run.finished for run in self.runs)

    @property
    def by_seed(self) -> dict[int, Run]:
        """Returns the runs by seed."""
        return {run.seed: run for run in self.runs}


def check_same_data(runs: Sequence[Run]) -> None:
    """Makes sure that runs may be compared.

    Their clients must own the same samples: equal places in the same data set. With different seeds they need not, as a
    seed also draws the partition, but then the partitions must have been asked for alike.

    Raises:
        RunError: naming two runs on different data.
    """
    for one, other in combinations(runs, 2):
        if on_same_data(one, other):
            continue
        changes = values_told(varied([redacted(_data(run)) for run in (one, other)]))
        same = "the same configuration" + (" and seed" if one.seed == other.seed else "")
        what = "other samples in its files" if _contents_differ(one, other) else "another partition.parquet"
        how = "; ".join(f"{path}: {' and '.join(map(_text, values))}" for path, values in changes.items())
        raise RunError(
            f"{one.uri} and {other.uri} were made on different data "
            f"({how or f'{same}, but {what}'}): numbers on different "
            "clients cannot be compared; report on them one by one, or use `rayfl compare --by-dataset`"
        )


def on_same_data(one: Run, other: Run) -> bool:
    """Returns whether numbers of two runs may be compared; see :func:`check_same_data`."""
    if _contents_differ(one, other) or drift_of(one) != drift_of(other):
        return False
    if one.partition_hash and one.partition_hash == other.partition_hash:
        return _samples(one) == _samples(other)
    may_differ = one.seed != other.seed or not (one.partition_hash and other.partition_hash)
    return may_differ and not varied([_data(one), _data(other)])


def _contents_differ(one: Run, other: Run) -> bool:
    """Returns whether samples of one description are known to be others: the data set's files have changed between."""
    contents = (one.content_hash, other.content_hash)
    if None in contents or contents[0] == contents[1]:
        return False
    drawn = _data(one)["dataset"]["name"] == "custom" and one.seed != other.seed
    described = [{"dataset": _data(run)["dataset"], "task": run.content.get("task")} for run in (one, other)]
    return not drawn and not varied(described)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Returns the groups in the order of their first runs. Unfinished runs are groups of their own.

    Raises:
        RunError: two runs have the same configuration and seed.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps([_identity(run), None if run.finished else run.uri], sort_keys=True, default=str)
        found.setdefault(key, []).append(run)
    groups = [sorted(members, key=lambda run: run.seed) for members in found.values()]
    for members in groups:
        for one, other in pairwise(members):
            if one.seed == other.seed:
                raise RunError(
                    f"{one.uri} and {other.uri} are the same experiment (configuration and seed {one.seed}): it would "
                    "count twice; leave one out"
                )
    return [Group(label, members) for label, members in zip(_labels(groups), groups, strict=True)]


def shown_model(groups: Sequence[Group]) -> str:
    """Returns in words which model stands for each run."""
    chosen = groups[0].runs[0].chosen
    return f"the row {chosen}" if chosen else "each method's personalized model (never chosen on test data)"


def config_table(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Returns by dotted path what the configurations of several groups have where they are not all equal."""
    options = values_told(varied([redacted(_identity(group.runs[0])) for group in groups]))
    return {path: [text_of(value) for value in values] for path, values in options.items()}


def _labels(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Returns the methods' names, with the differing values where a method comes more than once."""
    names = []
    for members in groups:
        run = members[0]
        same = [other[0] for other in groups if other[0].title == run.title]
        apart = _apart(run, same) if len(same) > 1 else ""
        names.append(f"{run.title} ({apart})" if apart else run.title)
    return [
        name if names.count(name) == 1 else f"{name} [{members[0].name}]"
        for name, members in zip(names, groups, strict=True)
    ]


def _apart(run: Run, others: Sequence[Run]) -> str:
    found = labels([redacted(_identity(other)) for other in others])[others.index(run)]
    return ", ".join(found if run.finished else [*found, "unfinished"])


def _identity(run: Run) -> dict[str, Any]:
    return {key: value for key, value in comparable(run.content).items() if key not in FREE | {"seed"}}


def _data(run: Run) -> dict[str, Any]:
    config = comparable(run.content)
    sections = {key: config.get(key) for key in _DATA}
    dataset = sections["dataset"]
    if isinstance(dataset, Mapping):
        sections["dataset"] = {key: value for key, value in dataset.items() if key not in _PLACES}
    held = {"unseen_clients": config.get("evaluation", {}).get("unseen_clients", 0.0)}
    return {**sections, "evaluation": held, "stages": drift_of(run)}


def drift_of(run: Run) -> Any:
    """Returns what says which samples the last evaluation had, and what they are like; None: those of the source.

    Classes and domains of later stages are not there yet in a run that has not come so far. Training samples are those
    of the stage and of the clients' memory, in stages of every kind.
    """
    section, stages = run.content.get("stages", {}), recorded_stages(run.content)
    stage = stages.stage_of(max((row["round"] for row in final_rows(run.rounds, run.measured)), default=1) - 1)
    if isinstance(stages, NoStages):
        return None
    if run.measured.split == "train":
        return {key: value for key, value in section.items() if key != "rounds"} | {"stage": stage + 1}
    if stages.name not in (*_ARRIVALS, *_DRIFTS):
        return None
    if stage == (stages.count - 1 if stages.name in _ARRIVALS else 0):
        return None
    needed = {"count"} if stages.name in _ARRIVALS else set()
    kept = {key: value for key, value in section.items() if key not in _NOT_OF_TESTS - needed}
    return {**kept, "stage": stage + 1}


def _samples(run: Run) -> dict[str, Any]:
    """What says which samples there are; of made-up data each option does."""
    dataset: Mapping[str, Any] = _data(run)["dataset"]
    made_up = str(dataset["name"]).startswith("synthetic")
    return {key: value for key, value in dataset.items() if made_up or key not in _SEEN}


def _text(value: Any) -> str:
    return "none" if value == ABSENT else text_of(value)
