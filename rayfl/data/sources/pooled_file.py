"""The file of a prepared data set without clients: Arrow, uncompressed, read in place.

One record batch with the columns ``x`` (a fixed-size list of uint8 or float32, an input flat) and ``y`` (int64); the
official parts lie one after the other. What the inputs mean is said by a JSON header in the schema's metadata. The file
is memory-mapped: all processes of a machine share its pages, and only the pages of samples that are used are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import reduce
from operator import add
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from rayfl.data.files.content import ContentHash
from rayfl.data.files.natural_file import METADATA_KEY
from rayfl.data.files.whole import new_file
from rayfl.data.images.moments import Moments, moments_of
from rayfl.data.sources.base import Samples
from rayfl.errors import DataError
from rayfl.examples import InputSpec

VERSION = 1
_HASHED_ROWS = 8192

Part = Literal["train", "test", "both"]


class PartHeader(BaseModel):
    """An official part of a data set.

    Attributes:
        rows: how many samples.
        moments: of their inputs.
    """

    model_config = ConfigDict(frozen=True)

    rows: int
    moments: Moments


class PooledHeader(BaseModel):
    """What the schema's metadata say of the samples.

    Attributes:
        kind: the data set, e.g. ``cifar10``.
        shape: shape of one input; a row holds it flat.
        num_classes: number of labels.
        storage: type of the values in ``x``; ``uint8`` stands for x / 255.
        parts: the official parts (``train``, ``test``) in the order of the rows.
        source: where the samples came from, in words.
        sha256: of the content (:class:`rayfl.data.files.content.ContentHash`).
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["pooled"] = "pooled"
    version: int = VERSION
    kind: str
    shape: tuple[int, ...]
    num_classes: int
    storage: Literal["uint8", "float32"]
    parts: dict[str, PartHeader]
    source: str
    sha256: str

    @property
    def spec(self) -> InputSpec:
        """What a model needs to know of the inputs."""
        return InputSpec("image", self.shape, self.num_classes)

    def arrow_schema(self) -> pa.Schema:
        """The file's columns, with this header in the metadata."""
        value = pa.field("item", pa.type_for_alias(self.storage), nullable=False)
        fields = [
            pa.field("x", pa.list_(value, math.prod(self.shape)), nullable=False),
            pa.field("y", pa.int64(), nullable=False),
        ]
        return pa.schema(fields, metadata={METADATA_KEY: self.model_dump_json().encode()})


class PooledFile:
    """An open file.

    Attributes:
        path: the file.
        header: what it says of its samples.
        x: all inputs, of shape (N, *shape), read-only and memory-mapped.
        y: all labels, int64 of shape (N,), likewise.
    """

    def __init__(self, path: Path) -> None:
        """Opens a file.

        Raises:
            DataError: no such file, or a damaged one, one of another format or of a newer version.
        """
        self.path = path
        try:
            file = pa.ipc.open_file(pa.memory_map(str(path)))
            self.header = _header(path, file.schema)
            if file.num_record_batches != 1:
                raise pa.ArrowInvalid(f"{file.num_record_batches} record batches")
            batch = file.get_batch(0)
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {str(error).strip()}; {_AGAIN}") from error
        rows = sum(part.rows for part in self.header.parts.values())
        if not file.schema.equals(self.header.arrow_schema()) or batch.num_rows != rows:
            raise DataError(f"{path}: the columns are not those that the header promises; {_AGAIN}")
        self.x = batch.column("x").flatten().to_numpy(zero_copy_only=True).reshape(rows, *self.header.shape)
        self.y = batch.column("y").to_numpy(zero_copy_only=True)

    def samples(self, part: Part) -> Samples:
        """A part of the samples, without copying.

        Raises:
            DataError: the data set has no such part.
        """
        parts = self.header.parts
        if part == "both":
            everything = list(parts.values())
            moments = reduce(add, (p.moments for p in everything))
            return Samples(self.x, self.y, self.header.spec, moments=moments)
        if part not in parts:
            raise DataError(f"dataset.part: {self.path} has no part {part!r}, only {', '.join(parts)}")
        start = 0
        for name, header in parts.items():
            if name == part:
                break
            start += header.rows
        rows = slice(start, start + parts[part].rows)
        return Samples(self.x[rows], self.y[rows], self.header.spec, moments=parts[part].moments)

    def content_hash(self) -> str:
        """The content's checksum, computed from its bytes as they are now."""
        digest = ContentHash()
        for start in range(0, len(self.y), _HASHED_ROWS):
            rows = slice(start, start + _HASHED_ROWS)
            digest.update(self.x[rows], self.y[rows])
        return digest.hexdigest()


_AGAIN = "delete it and make it again with `rayfl data prepare`"


def _header(path: Path, schema: pa.Schema) -> PooledHeader:
    try:
        fields = json.loads((schema.metadata or {})[METADATA_KEY])
        version = fields["version"]
        if type(version) is int and version > VERSION:
            raise DataError(
                f"{path} has version {version} of the format and this rayfl reads up to {VERSION}; update rayfl, or "
                f"{_AGAIN}"
            )
        return PooledHeader.model_validate(fields)
    except (ValueError, TypeError, KeyError) as error:  # pydantic's is a ValueError
        raise DataError(f"{path} is not a prepared data set of rayfl, or its header is damaged; {_AGAIN}") from error


def write_pooled(
    destination: Path,
    kind: str,
    parts: Mapping[str, tuple[np.ndarray, np.ndarray]],
    num_classes: int,
    source: str,
) -> PooledHeader:
    """Writes a file; it takes its name only when it is complete and on the disk.

    Args:
        destination: the file; an existing one is replaced, a missing folder is made.
        kind: the data set.
        parts: by official part, x of shape (n, *shape), uint8 or float32, and y of shape (n,), at least one sample.
        num_classes: number of labels.
        source: where the samples came from.

    Raises:
        DataError: a label is outside [0, num_classes), or the file cannot be written; nothing is left behind.
    """
    digest = ContentHash()
    for name, (x, y) in parts.items():
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
            raise DataError(
                f"{source}: the labels of the part {name} run from {y.min()} to {y.max()}, but there are {num_classes} "
                "classes"
            )
        digest.update(x, y)
    x = np.concatenate([x for x, _ in parts.values()]) if len(parts) > 1 else next(iter(parts.values()))[0]
    y = np.concatenate([y for _, y in parts.values()]).astype(np.int64)
    header = PooledHeader(
        kind=kind,
        shape=x.shape[1:],
        num_classes=num_classes,
        storage="uint8" if x.dtype == np.uint8 else "float32",
        parts={name: PartHeader(rows=len(y), moments=moments_of(x)) for name, (x, y) in parts.items()},
        source=source,
        sha256=digest.hexdigest(),
    )
    schema = header.arrow_schema()
    values = pa.array(np.ascontiguousarray(x).reshape(-1))
    columns = [pa.FixedSizeListArray.from_arrays(values, type=schema.field("x").type), pa.array(y)]
    with new_file(destination) as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return header
