"""Methods on several data sets: a comparison of its own for each, side by side as papers print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayfl.errors import RunError
from rayfl.report.columns import metrics_for
from rayfl.report.comparison import Comparison, compare
from rayfl.report.grouping import drift_of, on_same_data
from rayfl.report.lines import Wanted
from rayfl.runs.loading import Run


def compare_by_dataset(runs: Sequence[Run], wanted: Wanted) -> dict[str, Comparison]:
    """Returns the comparisons of the runs on each data set by the name of the data, in the order of the first runs.

    Best, second and tests are found for each data set apart; numbers on different data are never set against each
    other.

    Raises:
        RunError: the runs have different tasks; or as :func:`rayfl.report.comparison.compare`, on any of the data.
    """
    metrics_for(runs)
    families: list[list[Run]] = []
    for run in runs:
        home = next((family for family in families if all(on_same_data(run, other) for other in family)), None)
        if home is None:
            families.append([run])
        else:
            home.append(run)
    names = _names([family[0] for family in families])
    return {name: compare(family, wanted) for name, family in zip(names, families, strict=True)}


def _names(runs: Sequence[Run]) -> list[str]:
    """Returns the data sets' names; with the partition, and then the seed, where they do not tell the data apart."""
    for describe in (lambda run: run.dataset, _with_partition, lambda run: f"{_with_partition(run)}, seed {run.seed}"):
        names = [describe(run) for run in runs]
        if len(set(names)) == len(names):
            return names
    shown = ", ".join(run.uri for run in runs)
    raise RunError(f"these runs are on different data that are called alike: {shown}; compare them one by one")


def _with_partition(run: Run) -> str:
    parts = [run.dataset, described(run.content.get("partition") or {"name": "natural"})]
    if run.num_unseen:
        parts.append(f"{run.num_unseen} clients held out")
    if (drift := drift_of(run)) is not None:
        parts.append(described(drift))
    return ", ".join(parts)


def described(section: Mapping[str, Any]) -> str:
    """Returns a section of a configuration in words: its name, and the options that are set."""
    options = [f"{key}={value}" for key, value in section.items() if key != "name" and value not in (None, {}, [])]
    return f"{section['name']} ({', '.join(options)})" if options else str(section["name"])
