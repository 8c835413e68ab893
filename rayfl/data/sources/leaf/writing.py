"""What an import leaves: one Parquet file sorted by client, and a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayfl.data.files.content import ContentHash
from rayfl.data.files.records import SourceFile, drop_record, write_record
from rayfl.data.files.targets import to_column
from rayfl.data.sources.leaf.codec import Part, Split
from rayfl.data.sources.natural import NaturalHeader, write_natural

ROW_GROUP_TARGET = 1024

Sizes = Mapping[str, Mapping[Split, int]]
"""By client and split, the number of samples; train before test."""


@dataclass(frozen=True)
class Origin:
    """What an import reads.

    Attributes:
        source: the file or folder that was given.
        files: the files whose checksums are put on record.
        options: what decided which samples were taken, and how.
    """

    source: Path
    files: tuple[Path, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class ImportReport:
    """What an import did.

    Attributes:
        clients: number of clients with at least one sample.
        samples: number of samples by split, ``train`` and ``test``.
        warnings: oddities of the source, each with its file; the data were used all the same.
        destination: the file that was written.
    """

    clients: int
    samples: Mapping[str, int]
    warnings: tuple[str, ...]
    destination: Path


def write_clients(
    destination: Path,
    header: NaturalHeader,
    sizes: Sizes,
    part: Callable[[str, Split], Part],
    origin: Origin,
    metadata: Mapping[bytes, bytes] | None = None,
) -> None:
    """Write all clients in ascending order of their names; the file appears only when it is complete.

    Then its record is written beside it (:mod:`rayfl.data.files.records`); that of a replaced file is gone before.

    Args:
        destination: the Parquet file; an existing one is replaced, a missing folder is made.
        header: what the samples are.
        sizes: the clients and their numbers of samples.
        part: the samples of a client and split, of the types that ``header`` promises; called in the order of
            the file, so that only one row group is in memory.
        origin: for the record, what the samples were read from.
        metadata: more metadata for the schema.

    Raises:
        DataError: the file cannot be written, or what ``part`` raises; nothing is left behind.
    """
    schema = header.arrow_schema()
    schema = schema.with_metadata({**schema.metadata, **(metadata or {})})
    ordered = {client: sizes[client] for client in sorted(sizes)}
    content = ContentHash()
    drop_record(destination)
    write_natural(destination, schema, (_table(group, part, schema, content) for group in _row_groups(ordered)))
    files = tuple(map(SourceFile.of, origin.files))
    write_record(destination, content.hexdigest(), str(origin.source), files, origin.options)


def total(sizes: Sizes) -> dict[str, int]:
    """The number of samples of each split."""
    return {split: sum(parts.get(split, 0) for parts in sizes.values()) for split in _SPLITS}


_SPLITS: tuple[Split, Split] = ("train", "test")


def _row_groups(sizes: Sizes) -> Iterator[Sizes]:
    """Runs of whole clients of about ``ROW_GROUP_TARGET`` rows, so that loading a client decodes one group."""
    group: dict[str, Mapping[Split, int]] = {}
    rows = 0
    for client, parts in sizes.items():
        size = sum(parts.values())
        if group and rows + size > ROW_GROUP_TARGET:
            yield group
            group, rows = {}, 0
        group[client] = parts
        rows += size
    yield group


def _table(group: Sizes, part: Callable[[str, Split], Part], schema: pa.Schema, content: ContentHash) -> pa.Table:
    parts = [(client, split, part(client, split)) for client, splits in group.items() for split in splits]
    x_type = schema.field("x").type
    values = x_type.value_type.to_pandas_dtype()
    x = np.concatenate([samples.x for _, _, samples in parts]).astype(values, copy=False)
    y = np.concatenate([samples.y for _, _, samples in parts])
    owners = [(client, split) for client, split, samples in parts for _ in samples.y]
    content.update(x, y, [name for owner in owners for name in owner])
    columns = [
        pa.array([client for client, _ in owners], type=pa.string()),
        pa.array([split for _, split in owners], type=pa.string()),
        pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), type=x_type),
        to_column(y, schema.field("y").type),
    ]
    return pa.Table.from_arrays(columns, schema=schema)
