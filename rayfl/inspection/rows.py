"""Which rows of a run's tables are its method's personalized model."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rayfl.errors import RunError
from rayfl.inspection.folder import RunFolder

PERSONALIZED = "personalized"
"""What users may say for the method's personalized model, whatever its row is called."""


def where(table: pa.Table, **values: Any) -> pa.Table:
    """The rows in which columns have the given values."""
    for column, value in values.items():
        table = table.filter(pc.equal(table[column], value))
    return table


def received(run: RunFolder, split: str) -> pa.Table:
    """The summaries of all clients before local training."""
    return where(run.rounds, cohort="all", phase="received", split=split)


def personalized_rows(run: RunFolder, split: str = "test") -> pa.Table:
    """The summaries of the personalized model over all clients; of a sweep those chosen on validation data.

    Raises:
        RunError: when there are none, and what would record them.
    """
    algorithm = run.config.algorithm
    rows = received(run, split)
    if algorithm.sweep is None:
        found = where(rows, model=algorithm.personalized)
    else:
        found = where(rows, model=f"{algorithm.sweep}=best", selected_on="validation")
    if not found.num_rows:
        choice = f" chosen among {algorithm.sweep}=... on validation data" if algorithm.sweep else ""
        raise RunError(
            f"{run.storage.uri} has no rows of its personalized model{choice} in the split {split}: either the run has "
            "not come so far, or holdout.validation or evaluation.splits leave the split out. Name another model with "
            f"--model: {', '.join(models_in(rows))}"
        )
    return found


def model_rows(run: RunFolder, model: str, split: str = "test") -> pa.Table:
    """The summaries of a model over all clients; ``personalized`` is the method's personalized one.

    Raises:
        RunError: when there are none, naming the models that have some.
    """
    rows = received(run, split)
    found = where(rows, model=model, selected_on="")
    if found.num_rows:
        return found
    if model == PERSONALIZED:
        return personalized_rows(run, split)
    known = ", ".join(models_in(rows)) or "none"
    raise RunError(f"{run.storage.uri} has no model {model!r} in the split {split}; there are: {known}")


def models_in(rows: pa.Table) -> list[str]:
    """The models of some rows in the order they were recorded, without chosen ones."""
    return [str(name) for name in where(rows, selected_on="")["model"].unique().to_pylist()]


def personalized_model(run: RunFolder, round: int) -> str:
    """The row of ``clients.parquet`` that is the personalized model after a round.

    Of a sweep it is the member that did best on validation data at the newest evaluation until then.

    Raises:
        RunError: when there is none.
    """
    if run.config.algorithm.sweep is None:
        return str(run.config.algorithm.personalized)
    found = [row for row in personalized_rows(run).to_pylist() if row["round"] <= round]
    if not found:
        raise RunError(f"{run.storage.uri} has no personalized model chosen until round {round}; name one with --model")
    return str(max(found, key=lambda row: row["round"])["choice"])


def last_round(rows: pa.Table) -> int:
    """The newest round of some rows."""
    return int(pc.max(rows["round"]).as_py())
