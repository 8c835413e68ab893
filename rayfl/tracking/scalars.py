"""Names and values of a run's numbers, for trackers that keep one curve per name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ResourceError
from rayfl.results.personalized import PersonalizedRows
from rayfl.results.schemas import BUFFERED_ROUNDS_SCHEMA, CLIP_NORM

NAMES = ("top1", "top1_std", "top1_worst5", "top1_jain", "loss", "ece", "mce", "clients")
_KEYS = frozenset({*BUFFERED_ROUNDS_SCHEMA.names, CLIP_NORM})


def place(row: Mapping[str, Any]) -> str:
    """Returns where a summary row belongs: split, clients, phase and model."""
    selected = f" ({row['selected_on']})" if row["selected_on"] else ""
    whose = f"{row['cohort']} clients" if row["clients"] else row["cohort"]
    return f"{row['split']}, {whose}, {row['phase']}/{row['model']}{selected}"


@dataclass(frozen=True)
class Overview:
    """Chooses the numbers of summary rows that are looked at first, so that a tracker has few curves.

    Those are of the personalized and the global model. Of all clients: the task's first metric, the loss, and on test
    data also spread, worst clients and calibration. Of a round's cohort: the first metric on test data.

    Attributes:
        model: the row of the personalized model.
        selected_on: the split on which that row was chosen; empty for one that was not.
        first: the metric that the task is judged by.
    """

    model: str
    selected_on: str
    first: str

    @classmethod
    def of(cls, config: ExperimentConfig, first: str) -> Overview:
        """Returns the overview of a run.

        A choice is one on validation data; where the configuration leaves these out, one on test data.
        """
        model, selected_on = PersonalizedRows.of(config.algorithm).summary
        scored = config.evaluation.splits if config.holdout.validation else ("test",)
        if selected_on and selected_on not in scored:
            selected_on = "test"
        return cls(model, selected_on, first)

    def has_row(self, row: Mapping[str, Any]) -> bool:
        """Returns whether a summary row is of one of the two models."""
        return (row["model"], row["selected_on"]) in ((self.model, self.selected_on), ("global", ""))

    def has(self, row: Mapping[str, Any], name: str) -> bool:
        """Returns whether a number of a summary row is one of them."""
        if not self.has_row(row):
            return False
        if row["cohort"] == "selected":
            return row["split"] == "test" and name == self.first
        full = row["split"] == "test" and row["cohort"] == "all"
        return name in (self.first, "loss") or (full and name in (f"{self.first}_std", f"{self.first}_worst5", "ece"))


def scalars(rows: Iterable[Mapping[str, Any]], chosen: Overview | None = None) -> dict[str, float]:
    """The numbers of some summary rows by name, such as ``top1/test, all clients, received/global``.

    The task's own metrics come with their means, spreads and, of the first, worst clients. A clipping norm that moves
    is one number of its round, ``clip_norm``.

    Args:
        rows: of ``rounds.parquet``.
        chosen: leaves out all other numbers.
    """
    found = {}
    for row in rows:
        if row.get(CLIP_NORM) is not None:
            found[CLIP_NORM] = float(row[CLIP_NORM])
        own = [name for name in row if name not in _KEYS and not name.startswith("pooled_")]
        for name in (*NAMES, *own):
            # of other tasks than classification rows lack the columns of its first metric
            if row.get(name) is not None and (chosen is None or chosen.has(row, name)):
                found[f"{name}/{place(row)}"] = float(row[name])
    return found


def hyper_parameters(config: ExperimentConfig) -> dict[str, Any]:
    """Returns what identifies a run, flat, by dotted path; lists as text."""
    content = config.model_dump(
        mode="json",
        include={
            *("seed", "dataset", "partition", "long_tail", "holdout", "labelled", "stages"),
            *("model", "algorithm", "train"),
        },
    )
    return {
        path: value if isinstance(value, bool | int | float | str) else str(value) for path, value in _flat(content, "")
    }


def imported(package: str, option: str) -> Any:
    """A package that only some users have.

    Raises:
        ResourceError: when it is not installed, naming the option that asks for it.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ResourceError(
            f"{option} is true, but the package {package} is not installed: pip install {package}, or set it to false"
        ) from None


def _flat(content: Mapping[str, Any], path: str) -> Iterable[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
