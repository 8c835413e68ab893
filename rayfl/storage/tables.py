"""Stores tables as Parquet files: whole, or in parts while they grow."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
import pyarrow.parquet as pq

from rayfl.errors import DamageError
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import Manifest, StoredFile

LARGE_PART_BYTES = 1 << 20
"""Bytes from which on a part is not rewritten, which bounds what a commit rewrites."""
GROUP_ROWS = 1 << 17
"""Rows of a row group in a file of a whole table, and the number of rows in memory at a time."""


def to_parquet(table: pa.Table) -> bytes:
    """Returns the table as a Parquet file; equal tables give equal bytes."""
    return to_one_parquet([table], table.schema)


def from_parquet(data: bytes) -> pa.Table:
    """The inverse of :func:`to_parquet`."""
    # Without threads, which would keep the memory that they allocate.
    return pq.read_table(io.BytesIO(data), use_threads=False)


def to_one_parquet(tables: Iterable[pa.Table], schema: pa.Schema) -> bytes:
    """Returns the rows of several tables as one Parquet file, with only a part of them in memory at a time.

    Args:
        tables: tables in order; the division of rows among them does not change the file.
        schema: schema of all tables.
    """
    buffer = io.BytesIO()
    # Numbers hardly repeat: dictionary encoding takes three times as long and makes the file larger.
    strings = [field.name for field in schema if pa.types.is_string(field.type)]
    with pq.ParquetWriter(buffer, schema, compression="zstd", use_dictionary=strings) as writer:
        waiting = schema.empty_table()
        for table in tables:
            waiting = pa.concat_tables([waiting, table])
            full = waiting.num_rows - waiting.num_rows % GROUP_ROWS
            if full:
                writer.write_table(waiting.slice(0, full).combine_chunks(), row_group_size=GROUP_ROWS)
                waiting = waiting.slice(full)
        if waiting.num_rows:
            writer.write_table(waiting.combine_chunks(), row_group_size=GROUP_ROWS)
    return buffer.getvalue()


def same_rows(one: pa.Table, other: pa.Table) -> bool:
    """Returns whether two tables have the same columns and, to the bit, the same values; NaN is NaN."""
    return one.schema.equals(other.schema) and all(
        _bits(mine).equals(_bits(theirs)) for mine, theirs in zip(one.columns, other.columns, strict=True)
    )


def _bits(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_float64(column.type):
        return column
    return pa.chunked_array([chunk.view(pa.int64()) for chunk in column.chunks], pa.int64())


def read_parts(store: CommitStore, manifest: Manifest, name: str) -> Iterator[pa.Table]:
    """Yields the verified parts of a commit's table.

    Raises:
        DamageError: when the commit has no such table, or a part is missing, changed or no table.
    """
    for part in _files(manifest, name):
        yield decode_part(store.read(part), part)


def read_whole(store: CommitStore, manifest: Manifest, name: str) -> pa.Table:
    """Returns a table of a commit; raises like :func:`read_parts`."""
    return pa.concat_tables(list(read_parts(store, manifest, name)))


def publish_table(
    store: CommitStore, storage: Storage, manifest: Manifest, name: str, metadata: Mapping[bytes, bytes] | None = None
) -> None:
    """Writes a table of a commit beside ``commits/``, where users look for it. Raises like :func:`read_parts`.

    Args:
        store: commits of the run.
        storage: folder of the run.
        manifest: manifest of the commit.
        name: name of the table.
        metadata: metadata in addition to that of its parts, which an older rayfl may have written.
    """
    parts = read_parts(store, manifest, name)
    first = next(parts)
    storage.write(f"{name}.parquet", to_one_parquet(chain([first], parts), _with_metadata(first.schema, metadata)))


def _with_metadata(schema: pa.Schema, metadata: Mapping[bytes, bytes] | None) -> pa.Schema:
    return schema.with_metadata({**(schema.metadata or {}), **(metadata or {})})


def decode_part(data: bytes, part: StoredFile) -> pa.Table:
    """Returns the rows of a part; raises DamageError when it is no table."""
    try:
        return from_parquet(data)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DamageError(f"{part.name} is damaged: {error}") from error


@dataclass(frozen=True)
class _Part:
    rows: int
    file: StoredFile
    data: bytes | None
    """Content of the file, as long as the part may be rewritten; else None."""


class PartedTable:
    """A growing table, stored in parts.

    A commit writes the new rows, merged with those last parts that have no more rows than what is written. A row is
    thus rewritten each time its part doubles, and there are few small parts. Parts of 1 MiB are not rewritten. Only the
    content of the files of small parts is kept in memory.

    Args:
        name: name of the table.

    Attributes:
        rows: number of rows on storage.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._parts: list[_Part] = []
        self.rows = 0

    @classmethod
    def restored(cls, store: CommitStore, manifest: Manifest, name: str) -> tuple[PartedTable, pa.Schema]:
        """Returns a table of a commit and its schema.

        Raises:
            DamageError: when the commit has no such table, or a part is missing, changed or no table.
        """
        table, schema = cls(name), pa.schema([])
        for file in _files(manifest, name):
            data = store.read(file)
            part = decode_part(data, file)
            table._parts.append(_Part(part.num_rows, file, data if file.size < LARGE_PART_BYTES else None))
            table.rows += part.num_rows
            schema = part.schema
        return table, schema

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """Files of the parts, in the order of their rows."""
        return tuple(part.file for part in self._parts)

    def append(self, store: CommitStore, rounds_completed: int, rows: pa.Table) -> bool:
        """Stores new rows; returns whether a part was written. The first part is written even without rows.

        Args:
            store: commits of the run.
            rounds_completed: number of completed rounds, for the names of files.
            rows: rows after the first :attr:`rows`.
        """
        if self._parts and not rows.num_rows:
            return False
        kept, merged = list(self._parts), rows
        while kept and kept[-1].data is not None and kept[-1].rows <= merged.num_rows:
            last = kept.pop()
            assert last.data is not None
            merged = pa.concat_tables([from_parquet(last.data), merged])
        data = to_parquet(merged)
        file = store.write_table(rounds_completed, self._name, data)
        kept.append(_Part(merged.num_rows, file, data if len(data) < LARGE_PART_BYTES else None))
        self._parts = kept
        self.rows += rows.num_rows
        return True


def _files(manifest: Manifest, name: str) -> tuple[StoredFile, ...]:
    if name not in manifest.tables:
        raise DamageError(f"the commit of round {manifest.rounds_completed} has no table of {name}")
    return manifest.tables[name]
