"""The clients of a run: their distribution, the worst of them, and all in one table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rayfl.metrics import CLASSIFICATION, Metric
from rayfl.report.blocks import Block, Cell, Column, Table, figures, number
from rayfl.report.cells import metric_cell
from rayfl.report.details import client_details
from rayfl.report.drawing import Drawing
from rayfl.report.figures import client_distribution
from rayfl.report.rows import RowKey, client_rows, final_by_key
from rayfl.results.personalized import of_clients
from rayfl.results.schemas import first_metric, metrics_of
from rayfl.runs.loading import Run
from rayfl.runs.rows import attendance
from rayfl.runs.summary import label_of

CLIENTS_FILE = "figures/clients.csv"
_MOST_CLIENTS = 1000


def client_table(run: Run, shown: RowKey) -> pa.Table | None:
    """Returns one row per client after the last evaluation; None where the chosen models have no rows of their own.

    Columns: client, name, n (samples), accuracy, loss, ece and mce (or the task's metrics) of the shown model,
    global_accuracy (null without a global model), rounds (how often the client took part), bytes_down and bytes_up in
    those.
    """
    rows = client_rows(run, shown)
    if rows is None:
        return None
    first, common = first_metric(run.rounds), RowKey("global")
    shared = client_rows(run, common) if common in final_by_key(run) else None
    accuracy = (
        {} if shared is None else dict(zip(shared["client"].to_pylist(), shared[first.name].to_pylist(), strict=True))
    )
    taken: dict[int, list[Mapping[str, Any]]] = {}
    for row in attendance(run.clients).to_pylist():
        taken.setdefault(row["client"], []).append(row)
    clients = rows["client"].to_pylist()
    return pa.table(
        {
            "client": rows["client"],
            "name": rows["name"],
            "n": rows["n"],
            _column(first): rows[first.name],
            **{metric.name: rows[metric.name] for metric in others(run)},
            f"global_{_column(first)}": pa.array([accuracy.get(client) for client in clients], pa.float64()),
            "rounds": pa.array([len(taken.get(client, [])) for client in clients], pa.int64()),
            **{
                column: pa.array([sum(r[column] or 0 for r in taken.get(client, [])) for client in clients], pa.int64())
                for column in ("bytes_down", "bytes_up")
            },
        }
    )


def clients_section(run: Run, shown: RowKey, clients: pa.Table) -> list[Block]:
    """Returns the blocks on clients: how they differ, the worst, and all of them.

    Args:
        run: the run.
        shown: the row that is shown.
        clients: of :func:`client_table`.
    """
    drawn = client_distribution(run, _keys(run, shown))
    first = first_metric(run.rounds)
    order = _worst_first(run, clients)
    worst = clients.take(order[: math.ceil(len(order) / 20)])
    model = label_of(final_by_key(run)[shown])
    listed = clients if len(order) <= _MOST_CLIENTS else clients.take(order[:_MOST_CLIENTS])
    limit = "" if listed is clients else f" The worst {_MOST_CLIENTS:,} by {first.label}; the file has {len(order):,}."
    those = f"the clients that were evaluated ({of_clients(len(order), run.measured_clients)})"
    return [
        *figures([drawn]),
        _client_table(run, "worst-table", f"The worst 5 % of {those}, by {first.label} of {model}.", worst),
        _client_table(
            run,
            "clients-table",
            f"Every one of {those}: {first.label}, {_listed(others(run))} of {model}.{limit}",
            listed,
        ),
    ]


def details_of_clients(run: Run, shown: RowKey, clients: pa.Table, partition: Drawing | None) -> str:
    """Returns what the page says of each client of its table when it is chosen; see :func:`client_details`."""
    listed = clients["client"].take(_worst_first(run, clients)[:_MOST_CLIENTS]).to_pylist()
    return client_details(run, _keys(run, shown), sorted(listed), partition)


def _keys(run: Run, shown: RowKey) -> list[RowKey]:
    """Returns the global model's row, if there is one, and the one that is shown."""
    return list(dict.fromkeys(key for key in (RowKey("global"), shown) if key in final_by_key(run)))


def _worst_first(run: Run, clients: pa.Table) -> np.ndarray:
    first = first_metric(run.rounds)
    values = first.sign * np.asarray(clients[_column(first)].to_numpy(zero_copy_only=False), dtype=float)
    return np.argsort(values, kind="stable")


def _client_table(run: Run, name: str, caption: str, clients: pa.Table) -> Table:
    first, further = first_metric(run.rounds), others(run)
    own, common = _column(first), f"global_{_column(first)}"
    shared = clients[common].null_count < clients.num_rows
    whose = [f"global model {first.unit}".rstrip()] if shared else []
    names = (metric.heading if metric.unit == "%" else metric.label for metric in further)
    headings = ["samples", first.heading, *whose, *names, "rounds"]
    rows = []
    for row in clients.to_pylist():
        label = str(row["client"]) if row["name"] == str(row["client"]) else f"{row['client']} ({row['name']})"
        rows.append(
            [
                Cell(label, row["client"]),
                number(row["n"], 0),
                metric_cell(row[own], first),
                *([metric_cell(row[common], first)] if shared else []),
                *(metric_cell(row[metric.name], metric) for metric in further),
                number(row["rounds"], 0),
                number((row["bytes_down"] + row["bytes_up"]) / 1e6, 3),
            ]
        )
    columns = [Column("client", numeric=False), *(Column(text) for text in (*headings, "MB sent"))]
    note = "rounds: in which the client took part, of those whose cohort was scored; MB sent: down and up, in those"
    return Table(name, caption, columns, rows, [note], data=CLIENTS_FILE)


def others(run: Run) -> list[Metric]:
    """Returns the metrics that a table of clients has next to the first: of classification loss, ECE and MCE."""
    metrics = metrics_of(run.rounds)
    return [metric for name in ("loss", "ece", "mce") for metric in metrics if metric.name == name] + [
        metric for metric in metrics[1:] if metric not in CLASSIFICATION.metrics and metric.name != "loss"
    ]


def _column(first: Metric) -> str:
    return "accuracy" if first == CLASSIFICATION.first else first.name


def _listed(metrics: Sequence[Metric]) -> str:
    *before, last = [metric.label for metric in metrics]
    return f"{', '.join(before)} and {last}" if before else last
