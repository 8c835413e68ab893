"""Writes the file of a prepared data set of official parts: :mod:`rayfl.data.sources.preparation.pooled_file`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from rayfl.data.files.targets import to_column
from rayfl.data.files.whole import new_file
from rayfl.data.images.moments import moments_of
from rayfl.data.sources.preparation.pooled_file import PartHeader, PooledHeader, content_of
from rayfl.errors import DataError
from rayfl.examples import InputSpec


def storage_of(x: np.ndarray) -> Literal["uint8", "int32", "float32"]:
    """The type in which inputs are stored: pixels, tokens, or numbers."""
    return "uint8" if x.dtype == np.uint8 else "int32" if np.issubdtype(x.dtype, np.integer) else "float32"


def write_pooled(
    destination: Path,
    kind: str,
    parts: Mapping[str, tuple[np.ndarray, np.ndarray]],
    num_classes: int,
    source: str,
    spec: InputSpec | None = None,
    domains: Mapping[str, Mapping[str, int]] | None = None,
) -> PooledHeader:
    """Writes a file; it takes its name only when it is complete and on the disk.

    Args:
        destination: the file; an existing one is replaced, a missing folder is made.
        kind: the data set.
        parts: by official part, x of shape (n, *shape), uint8 or float32, and y of shape (n,), at least one sample.
        num_classes: number of labels.
        source: where the samples came from.
        spec: of samples that are no images of a class each.
        domains: by part, the domains in the order of the rows, and how many rows each has.

    Raises:
        DataError: a label is outside [0, num_classes), or the file cannot be written; nothing is left behind.
    """
    x = np.concatenate([x for x, _ in parts.values()]) if len(parts) > 1 else next(iter(parts.values()))[0]
    y = np.concatenate([y for _, y in parts.values()])
    rows = {name: len(labels) for name, (_, labels) in parts.items()}
    return write_rows(destination, kind, x, y, rows, num_classes, source, spec, domains)


def write_rows(
    destination: Path,
    kind: str,
    x: np.ndarray,
    y: np.ndarray,
    rows: Mapping[str, int],
    num_classes: int,
    source: str,
    spec: InputSpec | None = None,
    domains: Mapping[str, Mapping[str, int]] | None = None,
    clients: Mapping[str, Mapping[str, int]] | None = None,
) -> PooledHeader:
    """Writes a file of parts that lie in two arrays already, one after the other; ``x`` may be memory-mapped.

    Args:
        destination: see :func:`write_pooled`, as of the other arguments.
        kind: the data set.
        x: inputs of all parts.
        y: targets of all parts.
        rows: by official part, how many rows it has, in their order.
        num_classes: number of labels.
        source: where the samples came from.
        spec: of samples that are no images of a class each.
        domains: by part, the domains in the order of the rows, and how many rows each has.
        clients: by part, the clients likewise.

    Raises:
        DataError: as :func:`write_pooled`.
    """
    headers, of_classes = {}, spec is None or spec.target == "class"
    start = 0
    for name, count in rows.items():
        part_x, part_y = x[start : start + count], y[start : start + count]
        start += count
        if of_classes and count and not 0 <= int(part_y.min()) <= int(part_y.max()) < num_classes:
            raise DataError(
                f"{source}: the labels of the part {name} run from {part_y.min()} to {part_y.max()}, but there are "
                f"{num_classes} classes"
            )
        headers[name] = PartHeader(rows=count, moments=moments_of(part_x))
    known = PooledHeader(
        kind=kind,
        shape=x.shape[1:],
        num_classes=num_classes,
        storage=storage_of(x),
        parts=headers,
        source=source,
        sha256="",
        domains={name: dict(own) for name, own in (domains or {}).items() if own},
        clients={name: dict(own) for name, own in (clients or {}).items()},
        **_beyond_images(spec),
    )
    header = known.model_copy(update={"sha256": content_of(x, y, known.owners)})
    schema = header.arrow_schema()
    values = pa.array(np.ascontiguousarray(x).reshape(-1).astype(header.storage, copy=False))
    columns = [
        pa.FixedSizeListArray.from_arrays(values, type=schema.field("x").type),
        to_column(y, schema.field("y").type),
    ]
    with new_file(destination) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return header


def _beyond_images(spec: InputSpec | None) -> dict[str, Any]:
    if spec is None:
        return {}
    return {"target": spec.target, "input": spec.kind, "vocabulary": spec.vocabulary, "padding": spec.padding}
