"""The file of a prepared data set of official parts: Arrow, uncompressed, read in place.

One record batch with the columns ``x`` (a fixed-size list of uint8 or float32, an input flat) and ``y`` (int64); the
official parts lie one after the other. A JSON header in the schema's metadata says what the inputs mean, and whose the
rows are if they come with clients. The file is memory-mapped: all processes of a machine share its pages, and only the
pages of samples that are used are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from rayfl.data.files.content import ContentHash
from rayfl.data.files.natural_file import METADATA_KEY
from rayfl.data.files.targets import from_column, target_field
from rayfl.data.images.moments import Moments
from rayfl.data.sources.base import Samples
from rayfl.errors import DataError
from rayfl.examples import InputSpec, Kind, Target

VERSION = 1
_LATER = ("target", "input", "vocabulary", "padding", "domains", "clients")

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
        clients: of data that come with clients, by official part, how many rows each client has, likewise.
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
    clients: dict[str, dict[str, int]] = {}

    @property
    def spec(self) -> InputSpec:
        """Returns what a model needs to know of the inputs."""
        return InputSpec(self.input, self.shape, self.num_classes, self.vocabulary, self.target, self.padding)

    @property
    def owners(self) -> np.ndarray | None:
        """The client of each row, N names; None where there are no clients."""
        if not self.clients:
            return None
        runs = [run for part in self.parts for run in self.clients.get(part, {}).items()]
        return np.repeat([name for name, _ in runs], [count for _, count in runs])

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
        owners = self.header.owners
        promised = batch.num_rows == rows and (owners is None or len(owners) == rows)
        if not promised or not file.schema.equals(self.header.arrow_schema()):
            raise DataError(f"{path}: the columns are not those that the header promises; {_AGAIN}")
        self.x = batch.column("x").flatten().to_numpy(zero_copy_only=True).reshape(rows, *self.header.shape)
        self.y = from_column(batch.column("y")).reshape(rows, *self.header.spec.target_shape)

    def samples(self, part: Part) -> Samples:
        """A part of the samples, without copying; see :meth:`neighbours`."""
        return self.neighbours(list(self.header.parts) if part == "both" else [part])

    def neighbours(self, parts: Sequence[str]) -> Samples:
        """Samples of parts that lie one after the other, without copying.

        Raises:
            DataError: the data set has no such part.
        """
        known = self.header.parts
        for part in parts:
            if part not in known:
                raise DataError(f"dataset.part: {self.path} has no part {part!r}, only {', '.join(known)}")
        names = list(known)
        first = names.index(parts[0])
        assert names[first : first + len(parts)] == list(parts)
        start = sum(known[name].rows for name in names[:first])
        rows = slice(start, start + sum(known[part].rows for part in parts))
        moments = reduce(add, (known[part].moments for part in parts))
        content = self.header.sha256
        samples = Samples(self.x[rows], self.y[rows], self.header.spec, moments=moments, content=lambda: content)
        owners = self.header.owners
        return self._with_domains(samples if owners is None else replace(samples, clients=owners[rows]), parts)

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
        return content_of(self.x, self.y, self.header.owners)


def content_of(x: np.ndarray, y: np.ndarray, owners: np.ndarray | None) -> str:
    """The checksum of samples in arrays, which are read a few at a time.

    Args:
        x: inputs.
        y: targets.
        owners: the client of each sample; None where there are no clients.
    """
    digest = ContentHash()
    for start in range(0, len(y), _HASHED_ROWS):
        rows = slice(start, start + _HASHED_ROWS)
        digest.update(x[rows], y[rows], () if owners is None else owners[rows].tolist())
    return digest.hexdigest()


_HASHED_ROWS = 8192
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
