"""The tables at the end of a run about others than the clients that train on their own test data."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rayfl.experiment.result import Result
from rayfl.metrics import Metric
from rayfl.metrics.frequency import GROUPS
from rayfl.results.personalized import PersonalizedRows
from rayfl.results.schemas import metrics_of
from rayfl.results.stages import by_stage
from rayfl.runs.contributions import contribution_table
from rayfl.runs.measured import Measured
from rayfl.runs.summary import on_demand_table

FURTHER = {
    Measured("test", "unseen"): "clients held out from training, on their own test data",
    Measured("official", "all"): "clients' own models on the official test part, the same samples for all",
    Measured("official", "unseen"): "models of clients held out from training on the official test part",
}
"""What of a run is in no table of its clients' own test data, and in words."""


_OF_SERVER = (pc.field("split") == "official") & (pc.field("cohort") == "server")


def further_rows(rounds: pa.Table, own: PersonalizedRows, measured: Measured) -> list[dict[str, Any]]:
    """The rows of the last such evaluation: the global model, the personalized one, and others that are no sweep's."""
    return _last(rounds.filter(measured.rows), own)


def _last(rows: pa.Table, own: PersonalizedRows) -> list[dict[str, Any]]:
    if not rows.num_rows:
        return []
    last = rows.filter(pc.equal(rows["round"], pc.max(rows["round"]))).to_pylist()
    return [row for row in last if own.is_summary(row) or not (row["selected_on"] or own.is_member(row["model"]))]


def further_tables(result: Result) -> list[Table]:
    """Tables beside that of the clients' own test data.

    In order: of the server's models, of metrics on demand, of stages, of the first metric for what of :data:`FURTHER`
    there is, and of values of clients.
    """
    own, metrics = PersonalizedRows.of(result.config.algorithm), metrics_of(result.rounds)
    found = ((title, further_rows(result.rounds, own, measured)) for measured, title in FURTHER.items())
    tables = [_table(title, rows, own, metrics[0]) for title, rows in found if rows]
    of_server = _last(result.rounds.filter(_OF_SERVER), own)
    shown = [metrics[0], *(metric for metric in metrics if metric in GROUPS)]
    by_stages, of_values = stage_table(result), contribution_table(result)
    tables = tables if by_stages is None else [by_stages, *tables]
    tables = tables if of_values is None else [*tables, of_values]
    on_demand = on_demand_table(result)
    tables = [on_demand, *tables] if on_demand.row_count else tables
    return [_table_of_server(of_server, own, shown), *tables] if of_server else tables


def stage_table(result: Result) -> Table | None:
    """Returns how the personalized model has done on test samples of each stage, after each; None without stages."""
    own = PersonalizedRows.recorded(result.rounds) or PersonalizedRows.of(result.config.algorithm)
    found = by_stage(result.rounds, result.config.stages.stage_of, own)
    if found is None:
        return None
    metric, size = found.metric, len(found.scores)
    title = f"{metric.heading} of {own.label} on test samples of each stage, after each stage: mean over clients"
    left = {
        "average": found.average,
        "forgetting": found.forgetting,
        "backward transfer": found.backward_transfer,
    }
    table = Table(
        title=title,
        min_width=len(title),
        caption=", ".join(f"{name} {metric.shown(value)}" for name, value in left.items()),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
        caption_justify="left",
    )
    for heading in ("after", *(f"of {stage + 1}" for stage in range(size))):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage, row in enumerate(found.scores.tolist()):
        table.add_row(f"stage {stage + 1}", *(metric.shown(value) if value == value else "" for value in row))
    return table


def all_further(result: Result) -> list[dict[str, Any]]:
    """The rows of these tables."""
    own = PersonalizedRows.of(result.config.algorithm)
    of_clients = [row for measured in FURTHER for row in further_rows(result.rounds, own, measured)]
    return [*_last(result.rounds.filter(_OF_SERVER), own), *of_clients]


def _table_of_server(rows: list[dict[str, Any]], own: PersonalizedRows, metrics: list[Metric]) -> Table:
    title = f"The server's models on the official test part, {rows[0]['n']} samples"
    table = Table(
        title=title,
        min_width=len(title),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("model", overflow="fold")
    for metric in metrics:
        table.add_column(metric.heading, justify="right")
    for row in rows:
        style = "bold" if own.is_summary(row) else None
        shown = (metric.shown(row[metric.name]) for metric in metrics)
        table.add_row(str(row["choice"] or row["model"]), *shown, style=style)
    return table


def _table(title: str, rows: list[dict[str, Any]], own: PersonalizedRows, first: Metric) -> Table:
    table = Table(
        title=f"{title[0].upper()}{title[1:]}: mean +- std over clients",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("model", overflow="fold")
    table.add_column("clients", justify="right")
    table.add_column(first.heading, justify="right", no_wrap=True)
    for row in rows:
        spread = f"{first.shown(row[first.name])} +- {first.shown(row[f'{first.name}_std'])}"
        style = "bold" if own.is_summary(row) else None
        table.add_row(str(row["choice"] or row["model"]), str(row["clients"]), spread, style=style)
    return table
