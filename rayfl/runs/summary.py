"""Makes the tables that a run ends with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rayfl.experiment.client_privacy import client_promise
from rayfl.experiment.example_privacy import example_promise
from rayfl.experiment.result import Result
from rayfl.metrics import CLASSIFICATION, Metric
from rayfl.results.personalized import PersonalizedRows, of_clients, recorded_clients
from rayfl.results.schemas import metrics_of
from rayfl.runs.measured import Measured
from rayfl.runs.rows import final_rows, row_label

_SKIPPED_SHOWN = 10
_ROUNDS_SHOWN = 5


def shown_rows(result: Result) -> list[dict[str, Any]]:
    """Returns the rows of all clients after the last evaluation: on test data, else on validation data."""
    return final_rows(result.rounds) or final_rows(result.rounds, Measured("validation"))


def summary_table(result: Result) -> Table:
    """Returns two metrics (accuracy and ECE) of every model, mean +- standard deviation over clients, and how many.

    On test data; of runs that score none, on validation data.
    """
    rows, everybody = shown_rows(result), recorded_clients(result.rounds)
    split = rows[0]["split"] if rows else "validation"
    marked = any("test" in row["selected_on"] for row in rows)
    captions = ["* chosen on test data, as some papers do: not a fair estimate"] if marked else []
    privacy = result.config.privacy
    if privacy.noise_multiplier and everybody is not None:
        captions.append(client_promise(result.config, everybody, result.summed, result.rounds_completed))
    if privacy.example_noise_multiplier and result.samples:
        captions.append(example_promise(result.config, result.samples, result.rounds_completed, planned=False))
    table = Table(
        title=f"{split.capitalize()} data after round {result.rounds_completed}: mean +- std over clients",
        caption="\n".join(captions) or None,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
        caption_justify="left",
    )
    table.add_column("model", overflow="fold")
    first, second = headline_metrics(result.rounds)
    for heading in ("clients", first.heading, "worst 5 %", second.heading):
        table.add_column(heading, justify="right", no_wrap=True)
    own = PersonalizedRows.of(result.config.algorithm)
    for row in rows:
        style = "bold" if own.is_summary(row) else None
        table.add_row(
            label_of(row),
            of_clients(row["clients"], everybody),
            _spread(row, first),
            first.shown(row[f"{first.name}_worst5"]),
            _spread(row, second),
            style=style,
        )
    return table


def on_demand_table(result: Result) -> Table:
    """Returns the metrics on demand of the rows of :func:`summary_table`: means over clients, and of all samples."""
    table = Table(
        title="Metrics on demand: mean over clients / all clients' samples together",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("model", overflow="fold")
    asked = on_demand_metrics(result.rounds)
    for metric in asked:
        table.add_column(metric.heading, justify="right", min_width=len(max(metric.heading.split(), key=len)))
    for row in shown_rows(result) if asked else ():
        values = ((metric, row[metric.name], row.get(f"pooled_{metric.name}")) for metric in asked)
        table.add_row(
            label_of(row), *(f"{metric.shown(mean)} / {metric.shown(pooled)}" for metric, mean, pooled in values)
        )
    return table


def skipped_table(result: Result) -> Table:
    """Returns which clients were left out, how often and why: those left out most often."""
    found = (
        result.skipped.group_by(["client", "name", "procedure", "reason"]).aggregate([("round", "list")]).to_pylist()
    )
    found.sort(key=lambda row: (-len(row["round_list"]), row["client"], row["procedure"], row["reason"]))
    clients = pc.count_distinct(result.skipped["client"]).as_py()
    failed = "" if "system" in result.skipped["procedure"].to_pylist() else "failed and "
    table = Table(
        title=f"{clients} of the clients {failed}were left out of rounds (skipped.parquet)",
        caption=f"and {len(found) - _SKIPPED_SHOWN} more" if len(found) > _SKIPPED_SHOWN else None,
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        caption_justify="left",
    )
    for heading in ("client", "rounds", "procedure", "reason"):
        table.add_column(heading)
    for row in found[:_SKIPPED_SHOWN]:
        rounds = sorted(row["round_list"])
        shown = ", ".join(map(str, rounds[:_ROUNDS_SHOWN])) + (", ..." if len(rounds) > _ROUNDS_SHOWN else "")
        name = "" if row["name"] == str(row["client"]) else f" ({row['name']})"
        table.add_row(f"{row['client']}{name}", shown, row["procedure"], row["reason"])
    return table


def label_of(row: Mapping[str, Any]) -> str:
    """Returns what a row of ``rounds.parquet`` is called in tables for people."""
    return row_label(row["model"], row["selected_on"], row["choice"] or "")


def headline_metrics(rounds: pa.Table) -> tuple[Metric, Metric]:
    """Returns the two metrics of a short table: the task's first and second; of classification accuracy and ECE.

    Of a task with a single metric it is both.
    """
    metrics = metrics_of(rounds)
    return metrics[0], next((metric for metric in metrics if metric.name == "ece"), metrics[:2][-1])


def on_demand_metrics(rounds: pa.Table) -> list[Metric]:
    """Returns what a run has that classification has on demand (``task.metrics``), or by a backdoor; else nothing."""
    metrics = metrics_of(rounds)
    if metrics[0] != CLASSIFICATION.first:
        return []
    return [metric for metric in metrics if metric not in CLASSIFICATION.metrics]


def _spread(row: Mapping[str, Any], metric: Metric) -> str:
    return f"{metric.shown(row[metric.name])} +- {metric.shown(row[f'{metric.name}_std'])}"
