"""The report on one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

from rayfl.config.redaction import redact
from rayfl.metrics import CLASSIFICATION
from rayfl.report import contributions, costs, further, harm, stages
from rayfl.report.blocks import Block, Cell, Column, Facts, Mark, Page, Paragraph, Section, Table, figures
from rayfl.report.cells import SEEN_TEST, metric_cell, spread_cell, unit_of_bytes
from rayfl.report.clients import client_table, clients_section, details_of_clients
from rayfl.report.columns import metrics_for
from rayfl.report.curves import progress_of_models
from rayfl.report.figures import reliability
from rayfl.report.grouping import Group
from rayfl.report.lines import Wanted, lines_of, undefined
from rayfl.report.process import OpenParts, cohorts, partition_picture, phases
from rayfl.report.protocol import message_settings
from rayfl.report.rows import (
    RowKey,
    compared_keys,
    evaluated,
    final_by_key,
    lacking,
    own_key,
    rounds_done,
    shown_key,
    wall_seconds,
)
from rayfl.report.setup import setup
from rayfl.results.personalized import of_clients
from rayfl.results.schemas import first_metric, metrics_of
from rayfl.runs.loading import Run
from rayfl.runs.measured import Measured
from rayfl.runs.summary import headline_metrics, label_of, on_demand_metrics


def page_of_run(run: Run, open_parts: OpenParts) -> tuple[Page, pa.Table | None]:
    """Returns the page, and the table of its clients for :data:`CLIENTS_FILE`; None where no client was evaluated."""
    rows, own = final_by_key(run), own_key(run)
    notes = list(dict.fromkeys(run.notes))
    if not run.finished:
        notes.insert(0, f"The run is unfinished: {run.rounds_completed} of {run.total_rounds} rounds are done.")
    if not rows:
        notes.append(f"No evaluation of this kind yet ({run.measured.options}): there are no results to show.")
    elif own is None:
        notes.append(f"No number here is that of the method's personalized model: {lacking(run.viewed(chosen=''))}.")
    columns = metrics_for([run])
    notes += undefined(lines_of(Group(run.method, [run]), Wanted(columns)), columns)
    shown = shown_key(run) or next((key for key in rows if not key.selected_on), None)
    clients = None if shown is None else client_table(run, shown)
    partition = partition_picture(run, open_parts)
    sections = [
        Section("summary", "Summary", [_facts(run), *([_summary(run, rows)] if rows else [])]),
        Section("progress", "Progress", figures(progress_of_models(run))),
        Section("clients", "Clients", [] if shown is None or clients is None else clients_section(run, shown, clients)),
        Section("further", "Clients held out, and common test data", further.section(run)),
        Section("stages", "Stages", stages.section(run)),
        Section("contributions", "Contributions", contributions.section(run)),
        Section("harm", "Who is harmed", harm.section([Group(run.method, [run])], {run.method: compared_keys(run)})),
        Section("calibration", "Calibration", [] if shown is None else _calibration(run, shown)),
        Section("costs", "Costs", costs.section([Group(run.method, [run])])),
        Section("data", "Data", figures([partition])),
        Section("process", "Course of the run", _course(run)),
        Section("setup", "Configuration and environment", setup(run)),
    ]
    subtitle = f"{run.method} on {run.dataset}, {run.rounds_completed} of {run.total_rounds} rounds, seed {run.seed}"
    details = "" if shown is None or clients is None else details_of_clients(run, shown, clients, partition)
    return Page(run.name, subtitle, [section for section in sections if section.blocks], notes, details), clients


def _facts(run: Run) -> Facts:
    rows = list(final_by_key(run).values())
    seconds = wall_seconds(run)
    pairs = [
        ("Method", run.method),
        ("Data set", run.dataset),
        ("Rounds", rounds_done(run)),
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
    if settings := message_settings(run):
        pairs.insert(2, ("Messages", settings))
    if seconds is not None:
        pairs.insert(-2, ("Wall time", f"{seconds:,.1f} s, evaluation included"))
    return Facts(pairs)


def _extensions(entries: Sequence[Mapping[str, Any]]) -> str:
    """Returns in words where a run was given more rounds; empty where it never was."""
    known = [entry for entry in entries if isinstance(entry.get("rounds"), int)]
    return ", ".join(
        f"after round {entry.get('rounds_completed', '?')} from {before['rounds']} to {entry['rounds']} rounds"
        for before, entry in pairwise(known)
        if entry["rounds"] > before["rounds"]
    )


def _bytes(count: int) -> str:
    factor, unit = unit_of_bytes(count)
    return f"{count / factor:,.1f} {unit}" if factor > 1 else f"{count} bytes"


def _summary(run: Run, rows: Mapping[RowKey, Mapping[str, Any]]) -> Table:
    own = own_key(run)
    first, second = headline_metrics(run.rounds)
    asked = on_demand_metrics(run.rounds)
    losses = [metric for metric in metrics_of(run.rounds) if metric.name == "loss" != second.name]
    cells = []
    for key, row in rows.items():
        mark: Mark = "own" if key == own else ""
        cells.append(
            [
                Cell(label_of(row), mark=mark),
                Cell(of_clients(row["clients"], run.measured_clients), row["clients"], mark),
                spread_cell(row, first, mark),
                metric_cell(row[f"{first.name}_worst5"], first, mark),
                *(spread_cell(row, metric, mark) for metric in (second, *asked)),
                *(metric_cell(row["loss"], loss, mark) for loss in losses),
            ]
        )
    last = next(iter(rows.values()))["round"]
    return Table(
        "summary-table",
        f"{run.measured.split.capitalize()} data of {evaluated(run)}{run.measured.when} after round {last}: mean +- "
        "standard deviation over clients. Bold: the method's personalized model.",
        [
            *(Column(text, numeric=False) for text in ("model", "clients")),
            *(Column(text) for text in (first.heading, "worst 5 %")),
            *(Column(metric.heading) for metric in (second, *asked, *losses)),
        ],
        cells,
        [SEEN_TEST] if any(key.seen_test for key in rows) else [],
    )


def _calibration(run: Run, shown: RowKey) -> list[Block]:
    if first_metric(run.rounds) != CLASSIFICATION.first:
        return []
    keys = list(dict.fromkeys(key for key in (RowKey("global"), shown) if key in final_by_key(run)))
    drawn = reliability(run, keys)
    if drawn is None:
        return [
            Paragraph("The run has no calibration.parquet: it is of a rayfl that did not record bins of confidence.")
        ]
    return figures([drawn])


def _course(run: Run) -> list[Block]:
    trained = run.viewed(Measured(run.measured.split, "selected", "trained"))
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
