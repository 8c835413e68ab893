"""CSV that spreadsheets show and do not compute: names of clients and models are text, whatever they look like."""

from __future__ import annotations

from typing import IO

import pyarrow as pa
import pyarrow.csv

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a text begins that a spreadsheet takes for a formula, or hides such a beginning behind."""


def plain_cell(text: str) -> str:
    """A text as a cell: with an apostrophe before it where it would be computed. Numbers, and a lone dash, stay."""
    if not text.startswith(_FORMULA) or text == "-":
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def write_csv(table: pa.Table, file: IO[bytes]) -> None:
    """Writes a table; its texts and headings by :func:`plain_cell`."""
    columns = [
        pa.array([None if text is None else plain_cell(text) for text in column.to_pylist()], pa.string())
        if pa.types.is_string(column.type)
        else column
        for column in table.columns
    ]
    pyarrow.csv.write_csv(pa.table(columns, names=[plain_cell(name) for name in table.column_names]), file)
