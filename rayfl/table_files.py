"""Tables as Parquet files: whole ones, and those that are kept in parts while they grow."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from rayfl.commits import CommitStore
from rayfl.errors import DamageError
from rayfl.manifest import Manifest, StoredFile

_SETTLED_BYTES = 1 << 20
"""A part of this size is not written again: what a commit rewrites is bounded by it."""
_ROW_GROUP = 1 << 17
"""Rows of one group in a file of a whole table: as many as are in memory at once."""


def to_parquet(table: pa.Table) -> bytes:
    """The table as a Parquet file; equal tables give equal bytes."""
    return joined([table], table.schema)


def from_parquet(data: bytes) -> pa.Table:
    """The inverse of :func:`to_parquet`."""
    return pq.read_table(io.BytesIO(data))


def joined(tables: Iterable[pa.Table], schema: pa.Schema) -> bytes:
    """The rows of several tables as one Parquet file, with only a part of them in memory at once.

    Args:
        tables: in order; how the rows are divided among them does not change the file.
        schema: of all of them.
    """
    buffer = io.BytesIO()
    with pq.ParquetWriter(buffer, schema, compression="zstd") as writer:
        waiting = schema.empty_table()
        for table in tables:
            waiting = pa.concat_tables([waiting, table])
            full = waiting.num_rows - waiting.num_rows % _ROW_GROUP
            if full:
                writer.write_table(waiting.slice(0, full).combine_chunks(), row_group_size=_ROW_GROUP)
                waiting = waiting.slice(full)
        if waiting.num_rows:
            writer.write_table(waiting.combine_chunks(), row_group_size=_ROW_GROUP)
    return buffer.getvalue()


def same_rows(one: pa.Table, other: pa.Table) -> bool:
    """Whether two tables have the same columns and, to the bit, the same values; NaN is NaN."""
    return one.schema.equals(other.schema) and all(
        _bits(mine).equals(_bits(theirs)) for mine, theirs in zip(one.columns, other.columns, strict=True)
    )


def _bits(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_float64(column.type):
        return column
    return pa.chunked_array([chunk.view(pa.int64()) for chunk in column.chunks], pa.int64())


def read_parts(store: CommitStore, manifest: Manifest, name: str) -> Iterator[pa.Table]:
    """The parts of a commit's table, verified, one after the other.

    Raises:
        DamageError: when the commit has no such table, or a part is missing, changed or no table.
    """
    if name not in manifest.tables:
        raise DamageError(f"the commit of round {manifest.rounds_completed} has no table of {name}")
    for part in manifest.tables[name]:
        yield decoded(store.read(part), part)


def read_whole(store: CommitStore, manifest: Manifest, name: str) -> pa.Table:
    """A table of a commit; raises like :func:`read_parts`."""
    return pa.concat_tables(list(read_parts(store, manifest, name)))


def decoded(data: bytes, part: StoredFile) -> pa.Table:
    """The rows of a part; raises DamageError when it is no table."""
    try:
        return from_parquet(data)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamageError(f"{part.name} is damaged: {error}") from error


class PartedTable:
    """A table that only grows, and its parts on storage.

    A commit writes the new rows, together with those last parts that have not more rows than what is written: every
    row is written again each time that its part doubles, so that there are few small parts. A part of a mebibyte is
    settled, with all before it; its rows need not be kept in memory.

    Args:
        name: the table's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._parts: list[tuple[int, StoredFile]] = []  # each with its first row
        self._rows = -1

    @classmethod
    def restored(cls, store: CommitStore, manifest: Manifest, name: str) -> tuple[PartedTable, pa.Table]:
        """A table of a commit, and those of its rows that are not settled; raises like :func:`read_parts`."""
        table, recent = cls(name), list[pa.Table]()
        table._rows = 0
        for file, part in zip(manifest.tables.get(name, ()), read_parts(store, manifest, name), strict=True):
            table._parts.append((table._rows, file))
            table._rows += part.num_rows
            recent = [part.schema.empty_table()] if file.size >= _SETTLED_BYTES else [*recent, part]
        return table, pa.concat_tables(recent)

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """The parts, in the order of their rows."""
        return tuple(part for _, part in self._parts)

    @property
    def settled(self) -> int:
        """The number of rows, from the first on, that are on storage and will not be written again."""
        large = [index for index, (_, part) in enumerate(self._parts) if part.size >= _SETTLED_BYTES]
        if not large:
            return 0
        after = large[-1] + 1
        return self._parts[after][0] if after < len(self._parts) else self._rows

    def grow(self, store: CommitStore, rounds_completed: int, rows: pa.Table, first: int) -> bool:
        """Stores what is new; whether anything was.

        Args:
            store: where parts are written.
            rounds_completed: for their names.
            rows: all rows from ``first`` on.
            first: at most :attr:`settled`.
        """
        end = first + rows.num_rows
        if end == self._rows:
            return False
        start, kept = max(self._rows, 0), list(self._parts)
        while kept and kept[-1][1].size < _SETTLED_BYTES and start - kept[-1][0] <= end - start:
            start = kept.pop()[0]
        data = to_parquet(rows.slice(start - first))
        self._parts = [*kept, (start, store.write_table(rounds_completed, self._name, data))]
        self._rows = end
        return True
