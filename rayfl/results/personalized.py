"""Which rows of a run's tables are its method's personalized model: written into the tables, and read from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rayfl.errors import ConfigError, RunError
from rayfl.results.schemas import CLIENTS_KEY, PERSONALIZED_KEY, SWEEP_KEY, UNSEEN_KEY
from rayfl.results.summaries import Scores

FINETUNED_ROW = "finetuned"
"""The row of the final models that clients have fine-tuned for themselves (``algorithm.finetune_epochs``)."""


@dataclass(frozen=True)
class PersonalizedRows:
    """Where the personalized model is in a run's tables.

    Attributes:
        model: its row. A method that sweeps has no single one.
        sweep: prefix of the rows ``<sweep>=<value>`` among which one is chosen (``lambda``), or None.
    """

    model: str
    sweep: str | None = None

    @classmethod
    def of(cls, method: Any) -> PersonalizedRows:
        """Returns the rows of a method, given its class or an object of it."""
        return cls(str(method.personalized), method.sweep)

    @classmethod
    def recorded(cls, table: pa.Table) -> PersonalizedRows | None:
        """Returns the rows that a table itself names; None for tables from before they did."""
        metadata = table.schema.metadata or {}
        if PERSONALIZED_KEY not in metadata:
            return None
        sweep = metadata.get(SWEEP_KEY)
        return cls(metadata[PERSONALIZED_KEY].decode(), None if sweep is None else sweep.decode())

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """Returns what :meth:`recorded` reads."""
        sweep = {} if self.sweep is None else {SWEEP_KEY: self.sweep.encode()}
        return {PERSONALIZED_KEY: self.model.encode(), **sweep}

    @property
    def summary(self) -> tuple[str, str]:
        """``model`` and ``selected_on`` of its summaries over clients. A choice is one on validation data."""
        return (self.model, "") if self.sweep is None else (f"{self.sweep}=best", "validation")

    @property
    def label(self) -> str:
        """Returns what it is called in legends."""
        return self.model if self.sweep is None else f"best {self.sweep}"

    def is_summary(self, row: Mapping[str, Any]) -> bool:
        """Returns whether a row of ``rounds.parquet`` is about it."""
        return (row["model"], row["selected_on"]) == self.summary

    def is_member(self, model: str) -> bool:
        """Returns whether a row is one of those among which one is chosen."""
        return self.sweep is not None and model.startswith(f"{self.sweep}=")


def personalized_rows_of(
    rounds: pa.Table, method: Any | None, run: str, name: str, named: Sequence[str] = ()
) -> PersonalizedRows:
    """Finds out which rows of a run are its personalized model, without a guess.

    Args:
        rounds: the run's summaries; what they say themselves counts first.
        method: the run's method as a class or an object, where no code of a user has to be imported for it; else None.
        run: the run's folder, for messages.
        name: the method's name.
        named: rows that the user names for runs that do not say it; one of them must be in the tables.

    Returns:
        Of a run that was not evaluated yet no row.

    Raises:
        RunError: nobody knows; says which rows there are.
    """
    recorded = PersonalizedRows.recorded(rounds)
    if recorded is not None:
        return recorded
    if method is not None:
        return PersonalizedRows.of(method)
    rows = rounds.filter(pc.field("cohort") == "all").select(["model", "selected_on"]).to_pylist()
    if not rows:
        return PersonalizedRows("")
    # Only a method that sweeps has rows that were chosen.
    chosen = next((str(row["model"]).removesuffix("=best") for row in rows if row["selected_on"]), None)
    if chosen is not None:
        return PersonalizedRows(chosen, chosen)
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    fitting = [model for model in named if model in models]
    if len(fitting) == 1:
        return PersonalizedRows(fitting[0])
    raise RunError(
        f"{run} does not say which row is the personalized model of {name}, a method of your own: the run is of a "
        f"rayfl that did not record it. Name the row with --model NAME, or repeat the command that made the run, which "
        f"records it; there are: {', '.join(models)}"
    )


def recorded_clients(table: pa.Table) -> int | None:
    """K, the number of clients of a run that may train, as its tables say; None for tables from before they did."""
    found = (table.schema.metadata or {}).get(CLIENTS_KEY)
    return None if found is None else int(found)


def recorded_unseen(table: pa.Table) -> int:
    """Returns how many clients of a run are held out from training, as its tables say."""
    return int((table.schema.metadata or {}).get(UNSEEN_KEY, b"0"))


def of_clients(evaluated: int, everybody: int | None) -> str:
    """Returns how many clients a number is about, in words: ``20``, or ``12 of 14``."""
    return str(evaluated) if everybody in (None, evaluated) else f"{evaluated} of {everybody}"


def check_personalized(method: Any, scores: Scores, final: bool) -> None:
    """Makes sure that an evaluation has the row that the method says is its personalized model.

    A method that sweeps has no single one. Its rows may come with a second phase.

    Args:
        method: the method.
        scores: of any clients' predictors.
        final: whether it is the evaluation after the last round.

    Raises:
        ConfigError: it has no such row, or none at all; says which there are.
    """
    rows = list(dict.fromkeys(model for splits in scores.values() for models in splits.values() for model in models))
    if method.personalized_later and not final:
        return
    if not rows and any(scores.values()):
        raise ConfigError(
            f"algorithm: {method.name} has no predictors of any client, so that there is nothing to score: return them "
            "by name, one called as `personalized` says"
        )
    if not rows or method.sweep is not None or method.personalized in rows:
        return
    later = (
        "" if final else "; if the row comes with later evaluations only, set personalized_later = True in the class"
    )
    raise ConfigError(
        f"algorithm: {method.name} says that {method.personalized!r} is its personalized model (`personalized`), but "
        f"its predictors have no such row, only {', '.join(rows)}: name one of these{later}"
    )
