"""The report on one run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from rayfl.config.redaction import redact, redacted
from rayfl.metrics import CLASSIFICATION, Metric
from rayfl.report import costs, further, harm
from rayfl.report.blocks import Block, Cell, Code, Column, Facts, Mark, Page, Paragraph, Section, Table, figures, number
from rayfl.report.curves import progress_of_models
from rayfl.report.figures import client_distribution, reliability
from rayfl.report.grouping import Group
from rayfl.report.process import OpenParts, cohorts, partition_picture, phases
from rayfl.report.rows import (
    RowKey,
    attendance,
    client_rows,
    compared_keys,
    evaluated,
    final_rows,
    lacking,
    own_key,
    shown_key,
    wall_seconds,
)
from rayfl.results.personalized import of_clients
from rayfl.results.schemas import first_metric, metrics_of
from rayfl.runs.loading import Run
from rayfl.runs.measured import Measured
from rayfl.runs.summary import headline_metrics, row_label

CLIENTS_FILE = "figures/clients.csv"
SEEN_TEST = "* chosen on test data, as some papers do: not a fair estimate"
_MOST_CLIENTS = 1000


def page_of_run(run: Run, open_parts: OpenParts) -> tuple[Page, pa.Table | None]:
    """The page, and the table of its clients for :data:`CLIENTS_FILE`; None where no client was evaluated."""
    rows, own = final_rows(run), own_key(run)
    notes = list(run.notes)
    if not run.finished:
        notes.insert(0, f"The run is unfinished: {run.rounds_completed} of {run.total_rounds} rounds are done.")
    if not rows:
        notes.append(f"No evaluation of this kind yet ({run.measured.options}): there are no results to show.")
    elif own is None:
        notes.append(f"No number here is that of the method's personalized model: {lacking(replace(run, chosen=''))}.")
    shown = shown_key(run) or next((key for key in rows if not key.selected_on), None)
    clients = None if shown is None else client_table(run, shown)
    sections = [
        Section("summary", "Summary", [_facts(run), *([_summary(run, rows)] if rows else [])]),
        Section("progress", "Progress", figures(progress_of_models(run))),
        Section("clients", "Clients", [] if shown is None or clients is None else _clients(run, shown, clients)),
        Section("further", "Clients held out, and common test data", further.section(run)),
        Section("harm", "Who is harmed", harm.section([Group(run.method, [run])], {run.method: compared_keys(run)})),
        Section("calibration", "Calibration", [] if shown is None else _calibration(run, shown)),
        Section("costs", "Costs", costs.section([Group(run.method, [run])])),
        Section("data", "Data", figures([partition_picture(run, open_parts)])),
        Section("process", "Course of the run", _course(run)),
        Section("setup", "Configuration and environment", setup(run)),
    ]
    subtitle = f"{run.method} on {run.dataset}, {run.rounds_completed} of {run.total_rounds} rounds, seed {run.seed}"
    return Page(run.name, subtitle, [section for section in sections if section.blocks], notes), clients


def client_table(run: Run, shown: RowKey) -> pa.Table | None:
    """One row per client after the last evaluation; None where the chosen models have no rows of their own.

    Columns: client, name, n (samples), accuracy, loss, ece and mce (or the task's metrics) of the shown model,
    global_accuracy (null without a global model), rounds (how often the client took part), bytes_down and bytes_up in
    those.
    """
    rows = client_rows(run, shown)
    if rows is None:
        return None
    first, common = first_metric(run.rounds), RowKey("global")
    shared = client_rows(run, common) if common in final_rows(run) else None
    accuracy = (
        {} if shared is None else dict(zip(shared["client"].to_pylist(), shared[first.name].to_pylist(), strict=True))
    )
    taken: dict[int, list[Mapping[str, Any]]] = {}
    for row in attendance(run).to_pylist():
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


def setup(run: Run) -> list[Block]:
    """Configuration, environment, and how to do the run again."""
    blocks: list[Block] = []
    if run.environment:
        blocks.append(_environment(run.environment))
    else:
        blocks.append(Paragraph("The run did not record its environment."))
    blocks += [
        Code("Resolved configuration", yaml.safe_dump(redacted(dict(run.config)), sort_keys=False, allow_unicode=True)),
        Paragraph(
            "To do it again: install the versions above, put the data where the configuration says, and start the "
            "configuration under a new name. On CPUs the results are the same then, to the bit with equal versions and "
            f"processors, if the partition is: its hash is {run.partition_hash or 'not known here'}. `rayfl verify` "
            "checks that the folder is whole."
        ),
        Code("Commands", commands(run)),
    ]
    return blocks


def commands(run: Run) -> str:
    """Shell commands that do a run again."""
    last = run.environment[-1].get("versions") if run.environment else None
    versions = last if isinstance(last, Mapping) else {}
    pins = [f"{name}=={version}" for name, version in versions.items() if name not in ("python", "cuda", "rayfl")]
    lines = [f"rayfl verify {shlex.quote(run.uri)}"]
    if pins:
        lines.append(f"pip install {' '.join(shlex.quote(pin) for pin in pins)}")
    config = run.uri if "://" not in run.uri else "."
    lines.append(f"rayfl run {shlex.quote(f'{config}/config.yaml')} name={shlex.quote(f'{run.name}-again')}")
    return "\n".join(lines)


def _facts(run: Run) -> Facts:
    rows = list(final_rows(run).values())
    seconds = wall_seconds(run)
    pairs = [
        ("Method", run.method),
        ("Data set", run.dataset),
        ("Rounds", f"{run.rounds_completed} of {run.total_rounds}"),
        ("Seed", str(run.seed)),
        ("Partition", run.partition_hash[:16] or "not known"),
        ("Folder", run.uri),
    ]
    if rows:
        pairs.insert(
            2, ("Evaluated", f"{evaluated(run)}, {rows[0]['n']:,} {run.measured.split} samples{run.measured.when}")
        )
        pairs.insert(5, ("Sent", f"{_bytes(rows[0]['bytes_down'])} down, {_bytes(rows[0]['bytes_up'])} up"))
    if run.environment and (extended := _extensions(run.environment)):
        pairs.insert(-2, ("Extended", extended))
    if seconds is not None:
        pairs.insert(-2, ("Wall time", f"{seconds:,.1f} s, evaluation included"))
    return Facts(pairs)


def _extensions(entries: Sequence[Mapping[str, Any]]) -> str:
    """Where a run was given more rounds than it was begun with, in words; empty where it never was."""
    known = [entry for entry in entries if isinstance(entry.get("rounds"), int)]
    return ", ".join(
        f"after round {entry.get('rounds_completed', '?')} from {before['rounds']} to {entry['rounds']} rounds"
        for before, entry in pairwise(known)
        if entry["rounds"] > before["rounds"]
    )


def _bytes(count: int) -> str:
    factor, unit = next(
        (f, u) for f, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")) if count >= f or f == 1
    )
    return f"{count / factor:,.1f} {unit}" if factor > 1 else f"{count} bytes"


def _summary(run: Run, rows: Mapping[RowKey, Mapping[str, Any]]) -> Table:
    own = own_key(run)
    first, second = headline_metrics(run.rounds)
    loss = next(metric for metric in metrics_of(run.rounds) if metric.name == "loss")
    cells = []
    for key, row in rows.items():
        mark: Mark = "own" if key == own else ""
        cells.append(
            [
                Cell(row_label(row), mark=mark),
                Cell(of_clients(row["clients"], run.measured_clients), row["clients"], mark),
                _spread(row, first, mark),
                _number(row[f"{first.name}_worst5"], first, mark),
                _spread(row, second, mark),
                _number(row["loss"], loss, mark),
            ]
        )
    last = next(iter(rows.values()))["round"]
    return Table(
        "summary-table",
        f"{run.measured.split.capitalize()} data of {evaluated(run)}{run.measured.when} after round {last}: mean +- "
        "standard deviation over clients. Bold: the method's personalized model.",
        [
            *(Column(text, numeric=False) for text in ("model", "clients")),
            *(Column(text) for text in (first.heading, "worst 5 %", second.heading, "loss")),
        ],
        cells,
        [SEEN_TEST] if any(key.seen_test for key in rows) else [],
    )


def _clients(run: Run, shown: RowKey, clients: pa.Table) -> list[Block]:
    keys = [key for key in (RowKey("global"), shown) if key in final_rows(run)]
    drawn = client_distribution(run, list(dict.fromkeys(keys)))
    first = first_metric(run.rounds)
    values = first.sign * np.asarray(clients[_column(first)].to_numpy(zero_copy_only=False), dtype=float)
    order = np.argsort(values, kind="stable")
    worst = clients.take(order[: math.ceil(len(order) / 20)])
    model = row_label(final_rows(run)[shown])
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


def _client_table(run: Run, name: str, caption: str, clients: pa.Table) -> Table:
    first, further = first_metric(run.rounds), others(run)
    own, common = _column(first), f"global_{_column(first)}"
    shared = clients[common].null_count < clients.num_rows
    whose = [f"global model {first.unit}".rstrip()] if shared else []
    headings = ["samples", first.heading, *whose, *(metric.label for metric in further), "rounds"]
    rows = []
    for row in clients.to_pylist():
        label = str(row["client"]) if row["name"] == str(row["client"]) else f"{row['client']} ({row['name']})"
        rows.append(
            [
                Cell(label, row["client"]),
                number(row["n"], 0),
                _number(row[own], first),
                *([_number(row[common], first)] if shared else []),
                *(_number(row[metric.name], metric) for metric in further),
                number(row["rounds"], 0),
                number((row["bytes_down"] + row["bytes_up"]) / 1e6, 3),
            ]
        )
    columns = [Column("client", numeric=False), *(Column(text) for text in (*headings, "MB sent"))]
    note = "rounds: in which the client took part, of those whose cohort was scored; MB sent: down and up, in those"
    return Table(name, caption, columns, rows, [note], data=CLIENTS_FILE)


def others(run: Run) -> list[Metric]:
    """The metrics that a table of clients has next to the first: of classification loss, ECE and MCE."""
    metrics = metrics_of(run.rounds)
    return [metric for name in ("loss", "ece", "mce") for metric in metrics if metric.name == name] + [
        metric for metric in metrics[1:] if metric not in CLASSIFICATION.metrics and metric.name != "loss"
    ]


def _column(first: Metric) -> str:
    return "accuracy" if first == CLASSIFICATION.first else first.name


def _listed(metrics: Sequence[Metric]) -> str:
    *before, last = [metric.label for metric in metrics]
    return f"{', '.join(before)} and {last}" if before else last


def _number(value: float | None, metric: Metric, mark: Mark = "") -> Cell:
    return number(float("nan") if value is None else metric.scale * value, metric.digits, mark)


def _spread(row: Mapping[str, Any], metric: Metric, mark: Mark) -> Cell:
    value = row[metric.name]
    if value is None:
        return number(float("nan"), 0, mark)
    return Cell(f"{metric.shown(value)} +- {metric.shown(row[f'{metric.name}_std'])}", metric.scale * value, mark)


def _calibration(run: Run, shown: RowKey) -> list[Block]:
    if first_metric(run.rounds) != CLASSIFICATION.first:
        return []
    keys = list(dict.fromkeys(key for key in (RowKey("global"), shown) if key in final_rows(run)))
    drawn = reliability(run, keys)
    if drawn is None:
        return [
            Paragraph("The run has no calibration.parquet: it is of a rayfl that did not record bins of confidence.")
        ]
    return figures([drawn])


def _course(run: Run) -> list[Block]:
    trained = replace(run, measured=Measured(run.measured.split, "selected", "trained"))
    blocks = figures([*progress_of_models(trained), cohorts(run), phases(run)])
    if run.skipped.num_rows:
        blocks.append(_skipped(run.skipped))
    else:
        blocks.append(Paragraph("No client failed and was left out of a round."))
    return blocks


def _skipped(skipped: pa.Table) -> Table:
    grouped = skipped.group_by(["client", "name", "procedure", "reason"]).aggregate([("round", "list")]).to_pylist()
    grouped.sort(key=lambda row: (-len(row["round_list"]), row["client"], row["procedure"], row["reason"]))
    rows = [
        [
            Cell(f"{row['client']} ({row['name']})", row["client"]),
            Cell(", ".join(map(str, sorted(row["round_list"]))), len(row["round_list"])),
            Cell(row["procedure"]),
            Cell(redact(row["reason"])),
        ]
        for row in grouped
    ]
    headings = ("client", "rounds", "procedure", "reason")
    columns = [Column(text, numeric=False) for text in headings]
    return Table("skipped-table", "Clients that failed and were left out of rounds.", columns, rows)


def _environment(entries: Sequence[Mapping[str, Any]]) -> Table:
    """One column per start of the run, equal starts after another as one."""
    columns = [_environment_facts(entry) for entry in entries]
    kept = [
        (entry, facts)
        for n, (entry, facts) in enumerate(zip(entries, columns, strict=True))
        if n == 0 or facts != columns[n - 1]
    ]
    names = dict.fromkeys(name for _, facts in kept for name in facts)
    headings = [f"from round {entry.get('rounds_completed', '?')}, {entry.get('started', '?')}" for entry, _ in kept]
    rows = [[Cell(name), *(Cell(facts.get(name, "-")) for _, facts in kept)] for name in names]
    return Table(
        "environment-table",
        "With what the run was made.",
        [Column("what", numeric=False), *(Column(heading, numeric=False) for heading in headings)],
        rows,
        sortable=False,
    )


def _environment_facts(entry: Mapping[str, Any]) -> dict[str, str]:
    versions, machine, devices = (entry.get(part) or {} for part in ("versions", "machine", "devices"))
    facts = {str(name): str(version) for name, version in versions.items()}
    if machine:
        facts |= {
            "system": str(machine.get("system", "-")),
            "processor": f"{machine.get('processor', '-')}, {machine.get('cpus', '-')} CPUs",
            "GPUs of the driver": ", ".join(map(str, machine.get("gpus") or [])) or "none",
        }
        if isinstance(machine.get("memory"), int):
            facts["memory"] = f"{machine['memory'] / 2**30:.0f} GiB"
    facts["actors"] = ", ".join(f"{count} on {name}" for name, count in devices.items()) or "in the driver's process"
    return facts
