"""The file of a data set that comes already divided among clients: Parquet, or Arrow for reading in place.

A row is a sample, with the columns ``client``, ``split`` (``train`` or ``test``), ``x`` and ``y``, sorted by client;
what the inputs mean is said by a JSON header in the schema's metadata. An Arrow file (``*.arrow``) is memory-mapped, so
that all processes of a machine share its pages.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from rayfl.data.files.remedies import remedy
from rayfl.data.files.row_runs import Run, joined, runs_of
from rayfl.data.files.targets import from_column, target_field
from rayfl.data.files.whole import new_file
from rayfl.data.images.images import decode_images
from rayfl.data.images.moments import Moments
from rayfl.errors import DataError
from rayfl.examples import InputSpec, Kind, Target

METADATA_KEY = b"rayfl"
VERSION = 2
"""The newest version of the format; files without encoded images are of version 1, which older rayfls read."""

Inputs = Callable[[np.ndarray | slice], np.ndarray]
"""Gives inputs of shape (n, values) by their n places among the rows that were read; those of a slice in place."""

_ARROW_MAGIC = b"ARROW1"
_LATER = ("own_test", "moments", "sha256", "target", "padding")


class NaturalHeader(BaseModel):
    """What the schema's metadata say of the samples.

    Attributes:
        kind: the data set, e.g. ``femnist``.
        input: ``image`` (pixels in [0, 1]; vectors of any numbers where ``shape`` has one axis) or ``tokens`` (indices
            into an alphabet or a vocabulary).
        shape: shape of one input; a row holds it flat.
        num_classes: number of labels.
        vocabulary: number of distinct tokens; 0 for images.
        storage: type of the values in ``x``; an image stored as ``uint8`` has the pixels x / 255. ``encoded``: each
            ``x`` is an image file (PNG, JPEG, WebP), decoded to such pixels when its row is read; of version 2.
        own_test: whether the source divides into train and test; if not, all rows are ``train``.
        moments: of the images' train rows, where they are known.
        sha256: of the content (:class:`rayfl.data.files.content.ContentHash`), where it is known.
        target: what is known of a sample (:data:`rayfl.examples.Target`); ``num_classes`` counts outputs.
        padding: the token that fills rows up, if one does.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["natural"] = "natural"
    version: int = 1
    kind: str
    input: Kind
    shape: tuple[int, ...]
    num_classes: int
    vocabulary: int = 0
    storage: Literal["uint8", "uint16", "int32", "float32", "encoded"] = "uint8"
    own_test: bool = True
    moments: Moments | None = None
    sha256: str | None = None
    target: Target = "class"
    padding: int | None = None

    @property
    def spec(self) -> InputSpec:
        """Returns what a model needs to know of the inputs."""
        return InputSpec(self.input, self.shape, self.num_classes, self.vocabulary, self.target, self.padding)

    def arrow_schema(self) -> pa.Schema:
        """The file's columns, with this header in the metadata."""
        if self.storage == "encoded":
            x = pa.field("x", pa.binary(), nullable=False)
        else:
            value = pa.field("item", pa.type_for_alias(self.storage), nullable=False)
            x = pa.field("x", pa.list_(value, math.prod(self.shape)), nullable=False)
        fields = [
            pa.field("client", pa.string(), nullable=False),
            pa.field("split", pa.string(), nullable=False),
            x,
            target_field(self.spec, pa.int16()),
        ]
        # What came later is left out where it says nothing, so that equal data still make equal files.
        silent = {name for name in _LATER if getattr(self, name) == type(self).model_fields[name].default}
        return pa.schema(fields, metadata={METADATA_KEY: self.model_dump_json(exclude=silent).encode()})


class NaturalFile(ABC):
    """An open file; it stays open, so open another one in another process.

    Attributes:
        path: the file.
        header: what it says of its samples.
    """

    def __init__(self, path: Path, header: NaturalHeader, group_sizes: list[int]) -> None:
        self.path = path
        self.header = header
        self._starts = np.cumsum([0, *group_sizes], dtype=np.int64)

    @abstractmethod
    def owners(self) -> pa.Table:
        """The columns ``client`` and ``split`` of all rows; raises OSError or ArrowException."""

    def runs(self) -> list[Run]:
        """Returns whose the rows are, in the order of the file; raises OSError or ArrowException."""
        return runs_of(self.owners(), 0)

    @abstractmethod
    def _groups(self, first: int, last: int) -> pa.Table:
        """The columns ``x`` and ``y`` of some groups of rows."""

    def __len__(self) -> int:
        return int(self._starts[-1])

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs of shape (stop - start, values) and targets, from the groups that hold them only.

        Raises:
            OSError, ArrowException: the file is damaged.
            DataError: an image cannot be decoded.
        """
        inputs, y = self.undecoded(start, stop)
        return inputs(slice(None)), y

    def undecoded(self, start: int, stop: int) -> tuple[Inputs, np.ndarray]:
        """As :meth:`rows`, with a function in the place of the inputs that decodes those whose places it is given.

        Raises:
            OSError, ArrowException: the file is damaged.
        """
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left"))
        table = self._groups(first, last).slice(start - int(self._starts[first]), stop - start).combine_chunks()
        if not table.num_rows:
            y = from_column(pa.array([], self.header.arrow_schema().field("y").type))
            return self._nothing().__getitem__, y
        y = from_column(table.column("y").chunk(0))
        if self.header.storage == "encoded":
            return partial(self._decoded, table.column("x").chunk(0), start), y
        x = table.column("x").chunk(0).flatten().to_numpy()
        return x.reshape(stop - start, math.prod(self.header.shape)).__getitem__, y

    def _nothing(self) -> np.ndarray:
        dtype = "uint8" if self.header.storage == "encoded" else self.header.storage
        return np.empty((0, math.prod(self.header.shape)), dtype=dtype)

    def _decoded(self, images: pa.Array, start: int, places: np.ndarray | slice) -> np.ndarray:
        """The pixels of some encoded images, uint8 of shape (n, values)."""
        at = np.arange(len(images))[places].tolist()
        if not at:
            return self._nothing()
        found = decode_images(
            len(at), lambda one: images[at[one]].as_py(), lambda one: f"{self.path}, row {start + at[one]}"
        )
        if found.shape[1] == 1:  # all grey, where others of the file may have colours
            found = np.repeat(found, self.header.shape[0], axis=1)
        if found.shape[1:] != self.header.shape:
            raise DataError(
                f"{self.path}, row {start + at[0]}: the images have the shape {found.shape[1:]}, but the header says "
                f"{self.header.shape}; {remedy(self.path)}"
            )
        return found.reshape(len(found), -1)


class _Parquet(NaturalFile):
    def __init__(self, path: Path, header: NaturalHeader, file: pq.ParquetFile) -> None:
        super().__init__(path, header, [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)])
        self._file = file

    def owners(self) -> pa.Table:
        return self._file.read(columns=["client", "split"])

    def runs(self) -> list[Run]:
        """See the base class; groups of rows whose statistics name one client and one split are not read."""
        found: list[Run] = []
        for group in range(self._file.num_row_groups):
            start, stop = int(self._starts[group]), int(self._starts[group + 1])
            owner = self._single_owner(group)
            if owner is None:
                table = self._file.read_row_group(group, columns=["client", "split"])
                found += runs_of(table, start)
            elif stop > start:
                found.append((*owner, start, stop))
        return joined(found)

    def _single_owner(self, group: int) -> tuple[str, str] | None:
        """Client and split of a group that the file's statistics say to have one of each."""
        metadata, values = self._file.metadata.row_group(group), []
        for column in range(2):
            known = metadata.column(column).statistics
            if known is None or not known.has_min_max or known.min != known.max or known.null_count:
                return None
            values.append(str(known.min))
        return values[0], values[1]

    def _groups(self, first: int, last: int) -> pa.Table:
        return self._file.read_row_groups(list(range(first, last)), columns=["x", "y"])


class _Arrow(NaturalFile):
    def __init__(self, path: Path, header: NaturalHeader, file: pa.ipc.RecordBatchFileReader) -> None:
        self._batches = [file.get_batch(batch) for batch in range(file.num_record_batches)]
        self._schema = file.schema
        super().__init__(path, header, [batch.num_rows for batch in self._batches])

    def owners(self) -> pa.Table:
        return pa.Table.from_batches(self._batches, self._schema).select(["client", "split"])

    def _groups(self, first: int, last: int) -> pa.Table:
        return pa.Table.from_batches(self._batches[first:last], self._schema).select(["x", "y"])


def open_natural(path: Path) -> NaturalFile:
    """Opens a file, once its columns are known to be what the header says.

    Raises:
        DataError: no such file, or a file of another format or a newer version.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist; {remedy(path)}, or set RAYFL_DATA to the folder that has it")
    try:
        with path.open("rb") as start:
            arrow = start.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
        file = pa.ipc.open_file(pa.memory_map(str(path))) if arrow else pq.ParquetFile(path)
        schema = file.schema if arrow else file.schema_arrow
    except (OSError, pa.ArrowException) as error:
        kind = "Arrow" if path.suffix == ".arrow" else "Parquet"
        raise DataError(f"{path} is not a readable {kind} file: {str(error).strip()}; {remedy(path)}") from error
    header = _header(path, schema, "an Arrow" if arrow else "a Parquet")
    return _Arrow(path, header, file) if arrow else _Parquet(path, header, file)


def _header(path: Path, schema: pa.Schema, kind: str) -> NaturalHeader:
    text = (schema.metadata or {}).get(METADATA_KEY)
    if text is None:
        raise DataError(f"{path} is {kind} file, but not one of rayfl's; {remedy(path)}")
    try:
        fields = json.loads(text)
        version = fields["version"]
        if type(version) is int and version > VERSION:
            raise DataError(
                f"{path} has version {version} of the format and this rayfl reads up to {VERSION}; "
                f"update rayfl, or {remedy(path)}"
            )
        header = NaturalHeader.model_validate(fields)
    except (ValueError, TypeError, KeyError) as error:  # pydantic's is a ValueError
        raise DataError(f"{path} has a damaged header; {remedy(path)}") from error
    if not schema.equals(header.arrow_schema()):
        raise DataError(f"{path}: the columns are not those that the header promises; {remedy(path)}")
    return header


def write_natural(destination: Path, schema: pa.Schema, groups: Iterable[pa.Table]) -> None:
    """Write a file of one row group per table; it takes its name only when it is complete and on the disk.

    Args:
        destination: ``*.arrow`` for an uncompressed Arrow file, else Parquet; an existing file is replaced, a missing
            folder is made.
        schema: from :meth:`NaturalHeader.arrow_schema`.
        groups: whole clients in ascending order of their names, a client's train rows before its test rows.

    Raises:
        DataError: the file cannot be written; nothing is left behind.
    """
    with new_file(destination) as file:
        if destination.suffix == ".arrow":
            with pa.ipc.new_file(file, schema) as writer:
                for group in groups:
                    writer.write_table(group.combine_chunks())
        else:
            with pq.ParquetWriter(file, schema, compression="zstd") as writer:
                for group in groups:
                    writer.write_table(group, row_group_size=group.num_rows)
