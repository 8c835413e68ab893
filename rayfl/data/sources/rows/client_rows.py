"""Rows that belong to clients, written as a file of natural clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from rayfl.data.files.content import ContentHash
from rayfl.data.files.natural_file import NaturalHeader, write_natural
from rayfl.data.files.targets import to_column
from rayfl.data.images.moments import Moments, moments_of
from rayfl.data.sources.columns.reading import Rows
from rayfl.data.sources.preparation.pooled_writing import storage_of
from rayfl.errors import DataError
from rayfl.examples import InputSpec

BATCH_ROWS = 4096
"""Rows of a group of the file, which is what is in memory at a time."""
BATCH_BYTES = 1 << 28
"""Bytes of the inputs of a group: of large ones, such as volumes, a group has fewer rows."""
_MOST_NATURAL_CLASSES = 2**15
Owner = tuple[str, str]
"""A client's name, and a split."""


def write_clients(path: Path, rows: Rows, spec: InputSpec, own_test: bool, source: str, kind: str) -> str:
    """Writes rows with clients, sorted by these, and returns the checksum of their content.

    Args:
        path: the file, Arrow.
        rows: with clients.
        spec: of the samples.
        own_test: whether rows of the split test stay apart.
        source: where the rows are from, for messages.
        kind: the data set that they are of, for lists of files.

    Raises:
        DataError: no client could be trained or tested, or there are too many classes.
    """
    assert rows.clients is not None
    if spec.target == "class" and spec.num_classes > _MOST_NATURAL_CLASSES:
        raise DataError(f"{source}: {spec.num_classes} classes; data with clients have {_MOST_NATURAL_CLASSES} at most")
    own_test = own_test and rows.splits is not None and bool((rows.splits == "test").any())
    splits = rows.splits if rows.splits is not None else np.full(len(rows.y), "train", dtype=object)
    if own_test and not (splits == "train").any():
        raise DataError(
            f"{source}: all rows have the split test, so that there is nothing to train on; set dataset.part to test "
            "(each client's test part is then drawn from these rows)"
        )
    if own_test and not set(rows.clients[splits == "train"]) & set(rows.clients[splits == "test"]):
        raise DataError(
            f"{source}: no client has both train and test rows, so nobody could be tested on own data; set "
            "dataset.part to train (each client's test part is then drawn from its train rows)"
        )
    names = np.unique(rows.clients.astype(str))
    rank = np.searchsorted(names, rows.clients.astype(str))
    order = np.lexsort((splits == "test", rank))
    train = order[splits[order] == "train"]
    if not len(train):
        raise DataError(f"{source}: no row has the split train")
    digest = ContentHash()
    for x, y, owners in _batches(rows, splits, order):
        digest.update(x, y, [name for owner in owners for name in owner])
    header = NaturalHeader(
        kind=kind,
        input=spec.kind,
        shape=rows.x.shape[1:],
        num_classes=spec.num_classes,
        vocabulary=spec.vocabulary,
        storage=storage_of(rows.x),
        own_test=own_test,
        target=spec.target,
        padding=spec.padding,
        moments=None if spec.kind == "tokens" else _moments(rows.x, train),
        sha256=digest.hexdigest(),
    )
    schema = header.arrow_schema()
    write_natural(path, schema, (_table(batch, schema) for batch in _batches(rows, splits, order)))
    return digest.hexdigest()


def _moments(x: np.ndarray, train: np.ndarray) -> Moments:
    batch = _batch_rows(x)
    parts = [moments_of(x[train[start : start + batch]]) for start in range(0, len(train), batch)]
    return sum(parts[1:], start=parts[0])


def _batch_rows(x: np.ndarray) -> int:
    """Rows of a group: fewer of large inputs, such as volumes."""
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, x[:1].nbytes)))


def _batches(rows: Rows, splits: np.ndarray, order: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, list[Owner]]]:
    assert rows.clients is not None
    batch = _batch_rows(rows.x)
    for start in range(0, len(order), batch):
        at = order[start : start + batch]
        yield rows.x[at], rows.y[at], list(zip(rows.clients[at], splits[at], strict=True))


def _table(batch: tuple[np.ndarray, np.ndarray, list[Owner]], schema: pa.Schema) -> pa.Table:
    x, y, owners = batch
    columns = [
        pa.array([client for client, _ in owners], pa.string()),
        pa.array([split for _, split in owners], pa.string()),
        pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(x).reshape(-1)), type=schema.field("x").type),
        to_column(y, schema.field("y").type),
    ]
    return pa.Table.from_arrays(columns, schema=schema)
