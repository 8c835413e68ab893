"""Data sets that come already divided among clients: one Parquet file, sorted by client name.

A row is a sample, with the columns ``client``, ``split`` (``train`` or ``test``), ``x`` and ``y``; what
the inputs mean is said by a JSON header in the schema's metadata. :mod:`rayfl.data.leaf` writes such files.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import BaseModel, ConfigDict, Field

from rayfl.data.federated import SPLITS, Examples, FederatedDataset, InputSpec, Places
from rayfl.data.holdout import HoldoutConfig, split_client
from rayfl.data.noise import LabelNoise
from rayfl.data.public import draw_public
from rayfl.data.root import data_root
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

METADATA_KEY = b"rayfl"
VERSION = 1
_CLEAN = LabelNoise()
_MAKE_ONE = "make one from LEAF's JSON with `rayfl data import-leaf`"


class NaturalHeader(BaseModel):
    """What the schema's metadata say of the samples.

    Attributes:
        kind: the data set, e.g. ``femnist``.
        input: ``image`` (pixels in [0, 1]) or ``tokens`` (indices into an alphabet).
        shape: shape of one input; a row holds it flat.
        num_classes: number of labels.
        vocabulary: number of distinct tokens; 0 for images.
        storage: type of the values in ``x``; an image stored as ``uint8`` has the pixels x / 255.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal["natural"] = "natural"
    version: int = VERSION
    kind: str
    input: Literal["image", "tokens"]
    shape: tuple[int, ...]
    num_classes: int
    vocabulary: int = 0
    storage: Literal["uint8", "float32"] = "uint8"

    @property
    def spec(self) -> InputSpec:
        """The same, as a model needs it."""
        return InputSpec(self.input, self.shape, self.num_classes, self.vocabulary)

    def arrow_schema(self) -> pa.Schema:
        """The file's columns, with this header in the metadata."""
        value = pa.field("item", pa.type_for_alias(self.storage), nullable=False)
        fields = [
            pa.field("client", pa.string(), nullable=False),
            pa.field("split", pa.string(), nullable=False),
            pa.field("x", pa.list_(value, math.prod(self.shape)), nullable=False),
            pa.field("y", pa.int16(), nullable=False),
        ]
        return pa.schema(fields, metadata={METADATA_KEY: self.model_dump_json().encode()})


class LeafSource(BaseModel):
    """Configuration of a data set that keeps LEAF's own clients."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["leaf"] = "leaf"
    path: Path = Field(
        description="The Parquet file that `rayfl data import-leaf` wrote. A relative path is looked up in the "
        "folder of the environment variable RAYFL_DATA (default ~/.cache/rayfl)."
    )

    @property
    def resolved_path(self) -> Path:
        """The file's place on this machine."""
        return data_root() / self.path.expanduser()


class NaturalDataset(FederatedDataset):
    """Clients as the source made them; train and test stay apart as in the source.

    Clients are the names with at least one train sample, sorted. Of a client's n train samples,
    floor(validation * n) are drawn for validation, so a small client may have none; every split keeps the
    file's order. The file stays open; open another data set in another process.

    Args:
        path: a file that :func:`rayfl.data.leaf.import_leaf` wrote.
        validation: fraction of the train samples held out, in [0, 1).
        streams: the experiment's randomness; uses the stream ``holdout`` of each client, and ``public``.
        noise: wrong labels in train and validation parts; uses the stream ``noise`` of each client.
        public: number of unlabelled samples that belong to no client, drawn from the train parts.

    Raises:
        DataError: no such file, a file of another format or a newer version, rows out of order, or no
            client with a train sample.
    """

    def __init__(
        self, path: Path, validation: float, streams: RandomStreams, public: int = 0, noise: LabelNoise = _CLEAN
    ) -> None:
        if not 0 <= validation < 1:
            raise DataError(f"{path}: the validation fraction is {validation}; it must be at least 0 and below 1")
        self._path = path
        # The file has its own test part; only the validation part is drawn.
        self._holdout = HoldoutConfig(test=0, validation=validation)
        self._streams = streams
        self._noise = noise
        self._file, self._header = _open(path)
        self.spec = self._header.spec
        groups = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._group_starts = np.cumsum([0, *groups], dtype=np.int64)
        rows = {name: ranges for name, ranges in self._index().items() if "train" in ranges}
        if not rows:
            raise DataError(f"{path}: no client has a train sample; {_MAKE_ONE}")
        self.names = tuple(rows)
        self._rows = tuple(rows.values())
        self._taken: list[np.ndarray] = []
        if public:
            self._taken = draw_public(self.sizes()[:, 0], public, streams)

    def sizes(self) -> np.ndarray:
        """Samples by client and split: int64 of shape (K, 3), columns in the order of ``SPLITS``."""
        splits = (self._splits(client) for client in range(self.num_clients))
        return np.array([[len(rows[split]) for split in SPLITS] for rows in splits], dtype=np.int64)

    def load(self, client: int) -> Mapping[str, Examples]:
        """The three splits of one client, on the CPU.

        Images are float32 of shape (n, *shape) in [0, 1], tokens int64 of shape (n, *shape).

        Raises:
            DataError: the file's rows cannot be read.
        """
        x, y = self._read(client)
        noisy = y
        if self._noise.active:
            generator = self._streams.generator("noise", client=client)
            noisy = self._noise.corrupt(y.astype(np.int64), self.spec.num_classes, generator)
        labels = {"test": noisy if self._noise.in_test else y}
        places = self._splits(client)
        return {split: self._examples(x[at], labels.get(split, noisy)[at]) for split, at in _only(places, SPLITS)}

    def places(self, client: int) -> Places:
        """Positions within the client's rows, by split."""
        return dict(_only(self._splits(client), SPLITS))

    def public_places(self) -> np.ndarray:
        """Positions of the public samples within their clients' rows, client after client."""
        if not self._taken:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([self._splits(client)["public"] for client in range(self.num_clients)])

    def load_public(self) -> torch.Tensor:
        """The public samples in ascending order of their clients, shape (count, *shape)."""
        parts = [self.load(0)["train"].x[:0]]
        for client, taken in enumerate(self._taken):
            if len(taken):
                x, y = self._read(client)
                places = self._splits(client)["public"]
                parts.append(self._examples(x[places], y[places]).x)
        return torch.cat(parts)

    def _splits(self, client: int) -> dict[str, np.ndarray]:
        """Places of every split's samples within the client's rows."""
        train, test = len(self._rows[client]["train"]), len(self._rows[client].get("test", ()))
        splits = split_client(np.arange(train), self._holdout, self._streams.generator("holdout", client=client))
        if self._taken:
            splits["public"] = splits["train"][self._taken[client]]
            splits["train"] = np.delete(splits["train"], self._taken[client])
        return {**splits, "test": np.arange(train, train + test)}

    def _index(self) -> dict[str, dict[str, range]]:
        """Rows of every client and split, in the file's order, from the two columns that name them."""
        try:
            table = self._file.read(columns=["client", "split"])
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._path} cannot be read: {error}; {_MAKE_ONE}") from error
        clients = table.column("client").dictionary_encode().combine_chunks()
        splits = table.column("split").dictionary_encode().combine_chunks()
        names, parts = clients.dictionary.to_pylist(), splits.dictionary.to_pylist()
        if not set(parts) <= {"train", "test"}:
            raise DataError(f"{self._path}: the column split holds other values than train and test; {_MAKE_ONE}")
        runs = np.stack([clients.indices.to_numpy(), splits.indices.to_numpy()])
        starts = np.flatnonzero(np.diff(runs, prepend=-1).any(axis=0)).tolist()
        index: dict[str, dict[str, range]] = {}
        last = ""
        for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=False):
            name, split = names[runs[0, start]], parts[runs[1, start]]
            ranges = index.setdefault(name, {})
            if name < last or split in ranges or (split == "train" and ranges):
                raise DataError(f"{self._path}: the rows of client {name!r} are not in order; {_MAKE_ONE}")
            ranges[split] = range(start, stop)
            last = name
        return index

    def _read(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's raw inputs, of shape (n, values), and labels, train before test, from its row groups only."""
        ranges = self._rows[client]
        rows = range(ranges["train"].start, ranges.get("test", ranges["train"]).stop)
        first = int(np.searchsorted(self._group_starts, rows.start, side="right")) - 1
        last = int(np.searchsorted(self._group_starts, rows.stop, side="left"))
        try:
            table = self._file.read_row_groups(list(range(first, last)), columns=["x", "y"])
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{self._path}: client {self.names[client]!r} cannot be read: {error}; {_MAKE_ONE}"
            ) from error
        table = table.slice(rows.start - int(self._group_starts[first]), len(rows)).combine_chunks()
        x = table.column("x").combine_chunks().flatten().to_numpy()
        return x.reshape(len(rows), math.prod(self.spec.shape)), table.column("y").to_numpy()

    def _examples(self, x: np.ndarray, y: np.ndarray) -> Examples:
        inputs: np.ndarray
        if self._header.input == "tokens":
            inputs = x.astype(np.int64)
        else:
            scale = 255 if self._header.storage == "uint8" else 1
            inputs = x.astype(np.float32) / np.float32(scale)
        shaped = torch.from_numpy(inputs).reshape(len(y), *self.spec.shape)
        return Examples(shaped, torch.from_numpy(y.astype(np.int64)))


def _only(places: Places, splits: Iterable[str]) -> Iterable[tuple[str, np.ndarray]]:
    return [(split, places[split]) for split in splits]


def write_natural(destination: Path, schema: pa.Schema, groups: Iterable[pa.Table]) -> None:
    """Write a file of one row group per table; it takes its name only when it is complete and on the disk.

    Args:
        destination: the Parquet file; an existing one is replaced, a missing folder is made.
        schema: from :meth:`NaturalHeader.arrow_schema`.
        groups: whole clients in ascending order of their names, a client's train rows before its test rows.

    Raises:
        DataError: the file cannot be written; nothing is left behind.
    """
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                with pq.ParquetWriter(file, schema, compression="zstd") as writer:
                    for group in groups:
                        writer.write_table(group, row_group_size=group.num_rows)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(destination)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{destination} cannot be written: {error}; choose another destination") from error


def _open(path: Path) -> tuple[pq.ParquetFile, NaturalHeader]:
    """The open file and its header, once its columns are known to be what the header says."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; {_MAKE_ONE}, or set RAYFL_DATA to the folder that has it")
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a readable Parquet file: {str(error).strip()}; {_MAKE_ONE}") from error
    text = (file.schema_arrow.metadata or {}).get(METADATA_KEY)
    if text is None:
        raise DataError(f"{path} is a Parquet file, but not one of rayfl's; {_MAKE_ONE}")
    try:
        fields = json.loads(text)
        version = fields["version"]
        if type(version) is int and version > VERSION:
            raise DataError(
                f"{path} has version {version} of the format and this rayfl reads up to {VERSION}; "
                f"update rayfl, or {_MAKE_ONE}"
            )
        header = NaturalHeader.model_validate(fields)
    except (ValueError, TypeError, KeyError) as error:  # pydantic's is a ValueError
        raise DataError(f"{path} has a damaged header; {_MAKE_ONE}") from error
    if not file.schema_arrow.equals(header.arrow_schema()):
        raise DataError(f"{path}: the columns are not those that the header promises; {_MAKE_ONE}")
    return file, header
