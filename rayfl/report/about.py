"""What a comparison may be about in place of means: tables for a terminal, programs and papers."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

import pyarrow as pa
from rich.table import Table

from rayfl.report import costs, harm
from rayfl.report.blocks import Cell
from rayfl.report.columns import NO_NUMBER
from rayfl.report.comparison import Comparison
from rayfl.report.formats import Format, as_latex, as_markdown
from rayfl.report.paper import PaperCell, PaperTable
from rayfl.report.protocol import protocol
from rayfl.report.reaching import Reaching
from rayfl.report.several import keys_of
from rayfl.results.plain_csv import write_csv
from rayfl.results.plain_json import json_text
from rayfl.results.schemas import first_metric

About = Literal["harm", "costs", "target"]
JSON_SCHEMA = "rayfl.compare-{}/1"


def subject(about: About, reaching: Reaching | None = None) -> Any:
    """Returns what finds the lines of a table and writes it."""
    return reaching if about == "target" else {"harm": harm, "costs": costs}[about]


def tables(comparisons: Mapping[str, Comparison], of: Any) -> tuple[list[Table], list[str]]:
    """Tables for a terminal, one for each data set, and what a reader should know."""
    found, said = [], list[str]()
    for one in comparisons.values():
        lines, notes = of.found(one.groups, keys_of(one))
        found.append(of.terminal_table(one.groups, lines))
        said += [*one.notes, *notes]
    return found, list(dict.fromkeys(said))


def formatted(comparisons: Mapping[str, Comparison], about: About, of: Any, wanted: Format) -> str:
    """Everything that the tables show: for programs, each number in a field of its own; for papers, a table for each
    data set.
    """
    if wanted in ("markdown", "latex"):
        write = as_markdown if wanted == "markdown" else as_latex
        return "\n".join(write(_paper_table(name, one, about, of)) for name, one in comparisons.items())
    rows = list[dict[str, Any]]()
    said: dict[str, None] = {}
    for name, one in comparisons.items():
        lines, notes = of.found(one.groups, keys_of(one))
        metric = of.metric.column if isinstance(of, Reaching) else first_metric(one.groups[0].runs[0].rounds).name
        rows += [{"dataset": name, **asdict(one.measured), "metric": metric, **row} for row in of.as_rows(lines)]
        said |= dict.fromkeys([*one.notes, *notes])
    if wanted == "json":
        content = {"schema": JSON_SCHEMA.format(about), "rows": rows, "notes": list(said)}
        return json_text(content, indent=2) + "\n"
    buffer = io.BytesIO()
    write_csv(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue().decode()


def _paper_table(name: str, comparison: Comparison, about: About, of: Any) -> PaperTable:
    lines, notes = of.found(comparison.groups, keys_of(comparison))
    table = of.table(comparison.groups, lines)
    printed = {group.label: group.printed for group in comparison.groups}
    names = sum(not column.numeric for column in table.columns)
    # a column without any number says nothing: the notes say why
    known = [n for n in range(names, len(table.columns)) if any(_paper_cell(row[n]) for row in table.rows)]
    rows = {}
    for row in table.rows:
        models = [cell.text.replace("lambda", "λ") for cell in row[1:names]]
        rows[printed[row[0].text], *models] = [_paper_cell(row[n]) for n in known]
    return PaperTable(
        f"{table.caption} {protocol({name: comparison})}",
        [name],
        [table.columns[n].heading for n in known],
        [column.heading for column in table.columns[:names]],
        rows,
        [*comparison.notes, *notes],
        re.sub(r"[^a-zA-Z0-9]+", "-", f"{about}-{name}").strip("-"),
    )


def _paper_cell(cell: Cell) -> PaperCell | None:
    mean, _, spread = cell.text.partition(" +- ")
    return None if mean == NO_NUMBER else PaperCell(mean, spread, 0, "")
