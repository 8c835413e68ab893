"""Which rows of a run's tables are its method's personalized model."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rayfl.errors import RunError
from rayfl.runs.folder import RunFolder

PERSONALIZED = "personalized"
"""What users may say for the method's personalized model, whatever its row is called."""


NO_UNSEEN = (
    "{} has no rows of clients held out from training on {} data: run it with evaluation.unseen_clients=0.1, or leave "
    "out --cohort unseen"
)
"""What is said of a run without the cohort ``unseen``."""


def where(table: pa.Table, **values: Any) -> pa.Table:
    """The rows in which columns have the given values."""
    for column, value in values.items():
        table = table.filter(pc.equal(table[column], value))
    return table


def received(run: RunFolder, split: str, cohort: str = "all") -> pa.Table:
    """The summaries of all clients, or of those held out from training, before local training."""
    return where(run.rounds, cohort=cohort, phase="received", split=split)


def personalized_rows(run: RunFolder, split: str = "test", cohort: str = "all") -> pa.Table:
    """The summaries of the personalized model over clients; of a sweep those chosen on validation data.

    Raises:
        RunError: when there are none, and what would record them.
    """
    rows = received(run, split, cohort)
    model, selected_on = run.own.summary
    found = where(rows, model=model, selected_on=selected_on)
    if not found.num_rows:
        choice = f" chosen among {run.own.sweep}=... on validation data" if run.own.sweep else ""
        raise RunError(
            f"{run.storage.uri} has no rows of its personalized model{choice} in the split {split}: either the run has "
            "not come so far, or holdout.validation or evaluation.splits leave the split out. Name another model with "
            f"--model: {', '.join(models_in(rows))}"
        )
    return found


def model_rows(run: RunFolder, model: str | None, split: str = "test", cohort: str = "all") -> pa.Table:
    """The summaries of a model over clients.

    Args:
        run: the run.
        model: a row; None, or ``personalized`` where no row is called so: the method's personalized model.
        split: ``validation``, ``test`` or ``official``.
        cohort: ``all``, or ``unseen`` for those held out from training.

    Raises:
        RunError: when there are none, naming the models that have some.
    """
    rows = received(run, split, cohort)
    if cohort == "unseen" and not rows.num_rows:
        raise RunError(NO_UNSEEN.format(run.storage.uri, split))
    found = where(rows, model=model or "", selected_on="")
    if found.num_rows:
        return found
    if model in (None, PERSONALIZED):
        return personalized_rows(run, split, cohort)
    known = ", ".join(models_in(rows)) or "none"
    raise RunError(f"{run.storage.uri} has no model {model!r} in the split {split}; there are: {known}")


def models_in(rows: pa.Table) -> list[str]:
    """The models of some rows in the order they were recorded, without chosen ones."""
    return [str(name) for name in where(rows, selected_on="")["model"].unique().to_pylist()]


def named_model(run: RunFolder, model: str | None, models: Collection[str], round: int) -> str:
    """The row of ``clients.parquet`` that is meant by the name of a model.

    Args:
        run: the run.
        model: a row; None, or ``personalized`` where no row is called so: the method's personalized model.
        models: the rows that there are.
        round: after which round.
    """
    if model is None or (model == PERSONALIZED and model not in models):
        return personalized_model(run, round)
    return model


def personalized_model(run: RunFolder, round: int) -> str:
    """The row of ``clients.parquet`` that is the personalized model after a round.

    Of a sweep it is the member that did best on validation data at the newest evaluation until then.

    Raises:
        RunError: when there is none.
    """
    if run.own.sweep is None:
        return run.own.model
    found = [row for row in personalized_rows(run).to_pylist() if row["round"] <= round]
    if not found:
        raise RunError(f"{run.storage.uri} has no personalized model chosen until round {round}; name one with --model")
    return str(max(found, key=lambda row: row["round"])["choice"])


def last_round(rows: pa.Table) -> int:
    """The newest round of some rows."""
    return int(pc.max(rows["round"]).as_py())
