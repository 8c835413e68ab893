"""Which options define a metric: the numbers of runs that differ in them are not of one kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rayfl.config.added import ABSENT, comparable, value_at
from rayfl.config.adversarial import AdversarialConfig
from rayfl.config.differences import text_of
from rayfl.metrics.changed_inputs import ROBUST
from rayfl.metrics.frequency import GROUPS
from rayfl.metrics.people import FAIRNESS

_BY_FREQUENCY = tuple(metric.name for metric in GROUPS)
_OVERLAPS = ("dice", "iou", "dice_by_sample")
_OF_TASKS = {
    "task.loss": ("loss", "margin", "preference_accuracy"),
    "task.beta": ("loss", "margin"),
    "task.label_smoothing": ("loss",),
    "task.gamma": ("loss",),
    "task.odds_weight": ("loss",),
    "task.delta": ("loss",),
    "task.positive_weight": ("loss",),
    "task.background": (*_OVERLAPS, "loss"),
    "task.thresholds": ("auroc", "map"),
    "task.normal": ("auroc", "error", "loss"),
    "task.trains": ("loss",),
    "task.frequency": _BY_FREQUENCY,
    "task.frequency_bounds": _BY_FREQUENCY,
    "dataset.group": tuple(FAIRNESS),
    **{f"evaluation.adversarial.{name}": (ROBUST.name,) for name in AdversarialConfig.model_fields},
}
"""By option, the metrics that it defines."""
_OF_TOKENS = (
    "x", "kind", "tokenizer", "tokenizer_sha256", "vocabulary", "length", "padding", "template", "response", "chosen",
    "rejected",
)  # fmt: skip
"""Options of data that say which tokens are predicted, and so what all metrics of a language model are of."""
_OF_TEXTS = ("language_model", "preference")
"""The tasks whose models predict tokens."""


def defined_apart(contents: Sequence[Mapping[str, Any]], metrics: Mapping[str, str]) -> dict[str, list[str]]:
    """Finds numbers that runs define differently.

    Args:
        contents: the runs' configurations as plain data.
        metrics: by column, the metric of the task that its numbers are of.

    Returns:
        By what the runs differ in, as words, the columns that it sets apart.
    """
    found: dict[str, list[str]] = {}
    for column, metric in metrics.items():
        if paths := list(_differing(contents, metric)):
            found.setdefault(_told(contents, paths), []).append(column)
    return found


def _differing(contents: Sequence[Mapping[str, Any]], metric: str) -> Iterator[str]:
    """Yields the paths of options that define a metric and in which runs differ."""
    paths = [path for path, names in _OF_TASKS.items() if metric in names]
    if all(value_at(content, "task.name") in _OF_TEXTS for content in contents):
        paths += [f"dataset.{name}" for name in _OF_TOKENS]
    if metric == "loss" and all(value_at(one, "task.loss") == "cross_entropy" for one in contents):
        paths = [path for path in paths if path != "task.background"]  # it is about overlaps alone
    for path in paths:
        values = [value_at(content, path) for content in contents]
        if any(value != values[0] for value in values):
            yield path
    labels = [_wrong_test_labels(content) for content in contents]
    if any(one != labels[0] for one in labels):
        yield "noise"


def _wrong_test_labels(content: Mapping[str, Any]) -> Any:
    """Returns which labels of test parts are wrong (``noise.legacy``); None where they are as the data have them."""
    noise = value_at(comparable(content), "noise")
    wrong = isinstance(noise, Mapping) and noise.get("legacy") and noise.get("ratio") and noise.get("kind") != "none"
    return dict(noise) if wrong else None


def _told(contents: Sequence[Mapping[str, Any]], paths: Sequence[str]) -> str:
    texts = []
    for path in paths:
        values = (value_at(content, path) for content in contents)
        known = dict.fromkeys("none" if value is ABSENT else text_of(value) for value in values)
        texts.append(f"{path} ({', '.join(known)})")
    return ", ".join(texts)
