"""Which options define a metric: the numbers of runs that differ in them are not of one kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rayfl.config.added import ABSENT, value_at
from rayfl.config.differences import text_of
from rayfl.report.columns import Metric
from rayfl.runs.loading import Run

_OVERLAPS = ("dice", "iou", "dice_by_sample")
_OF_TASKS = {
    "task.loss": ("loss",),
    "task.delta": ("loss",),
    "task.positive_weight": ("loss",),
    "task.background": (*_OVERLAPS, "loss"),
    "task.thresholds": ("auroc", "map"),
}
"""By option of a task, the metrics that it defines."""
_OF_TOKENS = ("x", "kind", "tokenizer", "tokenizer_sha256", "vocabulary", "length", "padding", "template", "response")
"""Options of data that say which tokens are predicted, and so what all metrics of a language model are of."""


def told_apart(runs: Sequence[Run], metrics: Sequence[Metric]) -> tuple[tuple[Metric, ...], list[str]]:
    """Marks the columns whose numbers the runs' options define differently.

    Args:
        runs: which are compared.
        metrics: the columns.

    Returns:
        The columns, and a sentence for each set of options that sets some apart.
    """
    contents = [run.content for run in runs]
    found = {metric: list(_differing(contents, metric)) for metric in metrics}
    columns: dict[tuple[str, ...], list[str]] = {}
    for metric, paths in found.items():
        if paths:
            columns.setdefault(tuple(paths), []).append(metric.column)
    notes = [
        f"{', '.join(names)}: not defined alike, as the runs differ in {_told(contents, paths)}: no number of "
        f"{'these columns' if len(names) > 1 else 'this column'} is the best or tested"
        for paths, names in columns.items()
    ]
    return tuple(replace(metric, alike=not paths) for metric, paths in found.items()), notes


def _differing(contents: Sequence[Mapping[str, Any]], metric: Metric) -> Iterator[str]:
    """Yields the paths of options that define a metric and in which runs differ."""
    if all(value_at(content, "task.name") == "language_model" for content in contents):
        paths = [f"dataset.{name}" for name in _OF_TOKENS]
    else:
        paths = [path for path, names in _OF_TASKS.items() if metric.measured in names]
    if metric.measured == "loss" and all(value_at(one, "task.loss") == "cross_entropy" for one in contents):
        paths = [path for path in paths if path != "task.background"]  # it is about overlaps alone
    for path in paths:
        values = [value_at(content, path) for content in contents]
        if any(value != values[0] for value in values):
            yield path


def _told(contents: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> str:
    texts = []
    for path in paths:
        values = (value_at(content, path) for content in contents)
        known = dict.fromkeys("none" if value is ABSENT else text_of(value) for value in values)
        texts.append(f"{path} ({', '.join(known)})")
    return ", ".join(texts)
