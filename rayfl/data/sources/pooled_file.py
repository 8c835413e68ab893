"""The file of a prepared data set without clients: Arrow, uncompressed, read in place.

One record batch with the columns ``x`` (a fixed-size list of uint8 or float32, an input flat) and ``y`` (int64); the
official parts lie one after the other. What the inputs mean is said by a JSON header in the schema's metadata. The file
is memory-mapped: all processes of a machine share its pages, and only the pages of samples that are used are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from rayfl.data.files.content import ContentHash
from rayfl.data.files.natural_file import METADATA_KEY
from rayfl.data.files.targets import from_column, target_field, to_column
from rayfl.data.files.whole import new_file
from rayfl.data.images.moments import Moments, moments_of
from rayfl.data.sources.base import Samples
from rayfl.errors import DataError
from rayfl.examples import InputSpec, Kind, Target

VERSION = 1
_HASHED_ROWS = 8192
_LATER = ("target", "input", "vocabulary", "padding", "domains")

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
        target: what is known of a sample (:data:`rayfl.examples.Target`); ``num_classes`` counts outputs.
        input: ``image`` or ``tokens``.
        vocabulary: number of distinct tokens; 0 for images.
        padding: the token that fills rows up, if one does.
        domains: of data that have some, by official part, how many rows each domain has, in the order of the rows.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["pooled"] = "pooled"
    version: int = VERSION
    kind: str
    shape: tuple[int, ...]
    num_classes: int
    storage: Literal["uint8", "int32", "float32"]
    parts: dict[str, PartHeader]
    source: str
    sha256: str
    target: Target = "class"
    input: Kind = "image"
    vocabulary: int = 0
    padding: int | None = None
    domains: dict[str, dict[str, int]] = {}

    @property
    def spec(self) -> InputSpec:
        """Returns what a model needs to know of the inputs."""
        return InputSpec(self.input, self.shape, self.num_classes, self.vocabulary, self.target, self.padding)

    def arrow_schema(self) -> pa.Schema:
        """The file's columns, with this header in the metadata."""
        value = pa.field("item", pa.type_for_alias(self.storage), nullable=False)
        fields = [
            pa.field("x", pa.list_(value, math.prod(self.shape)), nullable=False),
            target_field(self.spec, pa.int64()),
        ]
        # What came later is left out where it says nothing, so that equal data still make equal files.
        silent = {name for name in _LATER if getattr(self, name) == type(self).model_fields[name].default}
        return pa.schema(fields, metadata={METADATA_KEY: self.model_dump_json(exclude=silent).encode()})


class PooledFile:
    """An open file.

    Attributes:
        path: the file.
        header: what it says of its samples.
        x: all inputs, of shape (N, *shape), read-only and memory-mapped.
        y: all labels, int64 of shape (N,), likewise; or other targets, of shape (N, ...).
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
        self.y = from_column(batch.column("y")).reshape(rows, *self.header.spec.target_shape)

    def samples(self, part: Part) -> Samples:
        """A part of the samples, without copying.

        Raises:
            DataError: the data set has no such part.
        """
        parts = self.header.parts
        if part == "both":
            everything = list(parts.values())
            moments = reduce(add, (p.moments for p in everything))
            return self._with_domains(self._samples(slice(None), moments), list(parts))
        if part not in parts:
            raise DataError(f"dataset.part: {self.path} has no part {part!r}, only {', '.join(parts)}")
        start = 0
        for name, header in parts.items():
            if name == part:
                break
            start += header.rows
        rows = slice(start, start + parts[part].rows)
        return self._with_domains(self._samples(rows, parts[part].moments), [part])

    def _samples(self, rows: slice, moments: Moments) -> Samples:
        content = self.header.sha256
        return Samples(self.x[rows], self.y[rows], self.header.spec, moments=moments, content=lambda: content)

    def _with_domains(self, samples: Samples, parts: Sequence[str]) -> Samples:
        known = self.header.domains
        if not known:
            return samples
        names = tuple(dict.fromkeys(name for rows in known.values() for name in rows))
        runs = [(names.index(name), count) for part in parts for name, count in known[part].items()]
        domain = np.repeat([number for number, _ in runs], [count for _, count in runs])
        return replace(samples, domains=names, domain=domain)

    def content_hash(self) -> str:
        """The content's checksum, computed from its bytes as they are now."""
        digest = ContentHash()
        for start in range(0, len(self.y), _HASHED_ROWS):
            rows = slice(start, start + _HASHED_ROWS)
            digest.update(self.x[rows], self.y[rows])
        return digest.hexdigest()


_AGAIN = "delete it and make it again with `rayfl data prepare`"


def storage_of(x: np.ndarray) -> Literal["uint8", "int32", "float32"]:
    """The type in which inputs are stored: pixels, tokens, or numbers."""
    return "uint8" if x.dtype == np.uint8 else "int32" if np.issubdtype(x.dtype, np.integer) else "float32"


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
    digest, of_classes = ContentHash(), spec is None or spec.target == "class"
    for name, (x, y) in parts.items():
        if of_classes and len(y) and not 0 <= int(y.min()) <= int(y.max()) < num_classes:
            raise DataError(
                f"{source}: the labels of the part {name} run from {y.min()} to {y.max()}, but there are {num_classes} "
                "classes"
            )
        digest.update(x, y)
    x = np.concatenate([x for x, _ in parts.values()]) if len(parts) > 1 else next(iter(parts.values()))[0]
    y = np.concatenate([y for _, y in parts.values()])
    header = PooledHeader(
        kind=kind,
        shape=x.shape[1:],
        num_classes=num_classes,
        storage=storage_of(x),
        parts={name: PartHeader(rows=len(y), moments=moments_of(x)) for name, (x, y) in parts.items()},
        source=source,
        sha256=digest.hexdigest(),
        domains={name: dict(rows) for name, rows in (domains or {}).items() if rows},
        **_beyond_images(spec),
    )
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
