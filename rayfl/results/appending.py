"""Tables that grow by some rows at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

_MOST_CHUNKS = 64


def without_first(table: pa.Table, rows: int) -> pa.Table:
    """The table without its first rows (or as many as it has), and without their memory, as a slice would be."""
    return table.take(np.arange(rows, table.num_rows)) if rows and table.num_rows else table


def appended(table: pa.Table, rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """The table with more rows, of these columns."""
    return joined(table, pa.Table.from_pylist(rows, schema=schema))


def joined(table: pa.Table, more: pa.Table) -> pa.Table:
    """The table with the rows of another one, and with its own metadata."""
    longer = pa.concat_tables([table, more.replace_schema_metadata(table.schema.metadata)])
    # Every chunk costs a kilobyte a column, whatever is in it, and time with every commit.
    return longer if longer.column(0).num_chunks <= _MOST_CHUNKS else longer.combine_chunks()


def with_nulls(values: np.ndarray | None, count: int) -> pa.Array:
    """Values of a metric; null where it is undefined, and everywhere where the task has no such metric."""
    if values is None:
        return pa.nulls(count, pa.float64())
    missing = np.isnan(values)
    return pa.array(values, mask=missing if missing.any() else None)
