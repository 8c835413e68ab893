"""What a comparison may be about in place of means, as a table for a terminal, CSV or JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from types import ModuleType
from typing import Any, Literal

import pyarrow as pa
from rich.table import Table

from rayfl.errors import ConfigError
from rayfl.report import costs, harm
from rayfl.report.comparison import Comparison
from rayfl.report.several import keys_of
from rayfl.results.plain_csv import write_csv
from rayfl.results.schemas import first_metric

About = Literal["harm", "costs"]
JSON_SCHEMA = "rayfl.compare-{}/1"
_MODULES: Mapping[str, ModuleType] = {"harm": harm, "costs": costs}


def tables(comparisons: Mapping[str, Comparison], about: About) -> tuple[list[Table], list[str]]:
    """Tables for a terminal, one for each data set, and what a reader should know."""
    found, said = [], list[str]()
    for one in comparisons.values():
        lines, notes = _MODULES[about].found(one.groups, keys_of(one))
        found.append(_MODULES[about].terminal_table(one.groups, lines))
        said += [*one.notes, *notes]
    return found, list(dict.fromkeys(said))


def formatted(comparisons: Mapping[str, Comparison], about: About, wanted: str) -> str:
    """Everything that the tables show, each number in a field of its own.

    Raises:
        ConfigError: for another format than ``csv`` and ``json``.
    """
    module, rows = _MODULES[about], list[dict[str, Any]]()
    said: dict[str, None] = {}
    for name, one in comparisons.items():
        lines, notes = module.found(one.groups, keys_of(one))
        metric = first_metric(one.groups[0].runs[0].rounds).name
        rows += [{"dataset": name, **asdict(one.measured), "metric": metric, **row} for row in module.as_rows(lines)]
        said |= dict.fromkeys([*one.notes, *notes])
    if wanted == "json":
        content = {"schema": JSON_SCHEMA.format(about), "rows": rows, "notes": list(said)}
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    if wanted != "csv":
        raise ConfigError(f"--about {about} is printed as a table, csv or json, not as {wanted}")
    buffer = io.BytesIO()
    write_csv(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue().decode()
