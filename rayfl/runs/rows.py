"""Finds rows in a run's tables: the last evaluation, a model's, those of the method's personalized model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rayfl.errors import RunError
from rayfl.runs.folder import RunFolder
from rayfl.runs.measured import EVERYBODY, Cohort, Measured, Split

PERSONALIZED = "personalized"
"""What users may say for the method's personalized model, whatever its row is called."""

NO_UNSEEN = (
    "{} has no rows of clients held out from training on {} data: run it with evaluation.unseen_clients=0.1, or leave "
    "out --cohort unseen"
)
"""What is said of a run without the cohort ``unseen``."""


def where(table: pa.Table, **values: Any) -> pa.Table:
    """Returns the rows in which columns have the given values."""
    for column, value in values.items():
        table = table.filter(pc.equal(table[column], value))
    return table


def row_label(model: str, selected_on: str = "", choice: str = "") -> str:
    """Returns what a row is called in tables and legends: a choice among a sweep says on what it was made.

    Args:
        model: of the row.
        selected_on: what it was chosen on; empty for a row that was not.
        choice: which of the sweep was chosen, if that is to be said.
    """
    if not selected_on:
        return {"lambda=0.0": "lambda=0.0 (global)", "lambda=1.0": "lambda=1.0 (local)"}.get(model, model)
    return f"{choice or model.removesuffix('=best')}, by {selected_on}{' *' if 'test' in selected_on else ''}"


def summaries(rounds: pa.Table, model: str, selected_on: str = "", measured: Measured = EVERYBODY) -> pa.Table:
    """Returns the rows of a model by ascending round, one an evaluation; figures and tables take their numbers here.

    Args:
        rounds: summaries, schema ``rayfl.results.schemas.ROUNDS_SCHEMA``.
        model: name of the row (``global``, ``hpm``, ``lambda=0.5``).
        selected_on: what a row that was chosen among a sweep was chosen on.
        measured: which evaluations count.
    """
    return where(rounds.filter(measured.rows), model=model, selected_on=selected_on).sort_by("round")


def final_rows(rounds: pa.Table, measured: Measured = EVERYBODY) -> list[dict[str, Any]]:
    """Returns the rows of the last evaluation, in the order in which they were recorded; none where there was none.

    Args:
        rounds: summaries, schema ``rayfl.results.schemas.ROUNDS_SCHEMA``.
        measured: which evaluations count.
    """
    rows = rounds.filter(measured.rows).to_pylist()
    last = max((row["round"] for row in rows), default=0)
    return [row for row in rows if row["round"] == last]


def rows_of_clients(clients: pa.Table, model: str, round: int, measured: Measured = EVERYBODY) -> pa.Table:
    """Returns the rows of a model after a round, one for each client that was evaluated, by client.

    Args:
        clients: schema ``rayfl.results.schemas.CLIENTS_SCHEMA``.
        model: name of the row.
        round: after which round.
        measured: which evaluations count.
    """
    return where(clients.filter(measured.rows), round=round, model=model).sort_by("client")


def attendance(clients: pa.Table) -> pa.Table:
    """Returns which client was in the cohort of which round: round, client, bytes_down, bytes_up.

    It is known of the rounds whose cohort was scored (``evaluation.cohort_every``).
    """
    chosen = where(clients, cohort="selected", phase="trained")
    grouped = chosen.group_by(["round", "client"]).aggregate([("bytes_down", "max"), ("bytes_up", "max")])
    names = {"bytes_down_max": "bytes_down", "bytes_up_max": "bytes_up"}
    return grouped.rename_columns([names.get(name, name) for name in grouped.column_names]).sort_by(
        [("round", "ascending"), ("client", "ascending")]
    )


def received(run: RunFolder, split: Split, cohort: Cohort = "all") -> pa.Table:
    """Returns the summaries of all clients, or of those held out from training, before local training."""
    return run.rounds.filter(Measured(split, cohort).rows)


def personalized_rows(run: RunFolder, split: Split = "test", cohort: Cohort = "all") -> pa.Table:
    """Returns the summaries of the personalized model over clients; of a sweep those chosen on validation data.

    Raises:
        RunError: when there are none, and what would record them.
    """
    rows = received(run, split, cohort)
    found = summaries(run.rounds, *run.own.summary, Measured(split, cohort))
    if not found.num_rows:
        choice = f" chosen among {run.own.sweep}=... on validation data" if run.own.sweep else ""
        why = "either the run has not come so far, or holdout.validation or evaluation.splits leave the split out"
        if run.own.sweep and split == "validation":
            why = "it is chosen there, and rows of the choice are of test data"
        others = ", ".join(models_in(rows))
        raise RunError(
            f"{run.uri} has no rows of its personalized model{choice} in the split {split}: {why}"
            + (f". Name another model with --model: {others}" if others else "")
        )
    return found


def model_rows(run: RunFolder, model: str | None, split: Split = "test", cohort: Cohort = "all") -> pa.Table:
    """Returns the summaries of a model over clients, by ascending round.

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
        raise RunError(NO_UNSEEN.format(run.uri, split))
    found = summaries(run.rounds, model or "", measured=Measured(split, cohort))
    if found.num_rows:
        return found
    if model in (None, PERSONALIZED):
        return personalized_rows(run, split, cohort)
    known = ", ".join(models_in(rows)) or "none"
    raise RunError(f"{run.uri} has no model {model!r} in the split {split}; there are: {known}")


def models_in(rows: pa.Table) -> list[str]:
    """Returns the models of some rows in the order they were recorded, without chosen ones."""
    return [str(name) for name in where(rows, selected_on="")["model"].unique().to_pylist()]


def named_model(run: RunFolder, model: str | None, models: Collection[str], round: int, cohort: Cohort = "all") -> str:
    """Returns the row of ``clients.parquet`` that is meant by the name of a model.

    Args:
        run: the run.
        model: a row; None, or ``personalized`` where no row is called so: the method's personalized model.
        models: the rows that there are.
        round: after which round.
        cohort: whose model it is.
    """
    if model is None or (model == PERSONALIZED and model not in models):
        return personalized_model(run, round, cohort)
    return model


def personalized_model(run: RunFolder, round: int, cohort: Cohort = "all") -> str:
    """Returns the row of ``clients.parquet`` that is the personalized model after a round.

    Of a sweep it is the member that did best on validation data of the cohort at the newest evaluation until then.

    Raises:
        RunError: when there is none.
    """
    if run.own.sweep is None:
        return run.own.model
    splits: tuple[Split, ...] = ("test", "official", "train")
    chosen = [summaries(run.rounds, *run.own.summary, Measured(split, cohort)) for split in splits]
    rows = next((table for table in chosen if table.num_rows), None) or personalized_rows(run, cohort=cohort)
    found = [row for row in rows.to_pylist() if row["round"] <= round]
    if not found:
        raise RunError(f"{run.uri} has no personalized model chosen until round {round}; name one with --model")
    return str(max(found, key=lambda row: row["round"])["choice"])


def last_of_seeds(runs: Sequence[RunFolder], model: str | None, split: Split) -> list[dict[str, Any]]:
    """Returns the row of each run's last evaluation of a model over all clients, for a mean over seeds.

    Args:
        runs: of one experiment, with different seeds.
        model: as for :func:`model_rows`.
        split: ``validation`` or ``test``.

    Raises:
        RunError: there are no such rows, or the runs are at different rounds.
    """
    tables = [model_rows(run, model, split) for run in runs]
    last: list[dict[str, Any]] = [where(table, round=last_round(table)).to_pylist()[0] for table in tables]
    rounds = [row["round"] for row in last]
    if len(set(rounds)) > 1:
        least, most = (runs[rounds.index(end)].uri for end in (min(rounds), max(rounds)))
        raise RunError(
            f"{least} was evaluated last after round {min(rounds)}, and {most}, with another seed, after round "
            f"{max(rounds)}: there is no mean of the two; finish the first, or leave it out"
        )
    return last


def last_round(rows: pa.Table) -> int:
    """Returns the newest round of some rows."""
    return int(pc.max(rows["round"]).as_py())
