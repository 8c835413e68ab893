"""Who owns which sample, as a table: written beside every run, hashed into its results, and usable as a partition."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from rayfl.data.federated import FederatedDataset
from rayfl.errors import DataError
from rayfl.examples import SPLITS, UNLABELLED, Places

PUBLIC = "public"
_PARTS = (*SPLITS, PUBLIC, UNLABELLED)
ASSIGNMENT_SCHEMA = pa.schema([("client", pa.int32()), ("split", pa.string()), ("sample", pa.int64())])
"""One row per sample. ``sample`` counts within the source; for data sets that come divided, within the client's rows.
Public samples have the client -1. Training samples without a label have the split ``unlabelled``; where the table is
used as a partition they are training samples like the others, and the section ``labelled`` says which have labels."""
_UNSEEN_KEY = b"rayfl.unseen"
"""In the schema's metadata: how many clients, the last ones, are held out from training; missing if none is."""


def assignment(dataset: FederatedDataset, unseen: int = 0) -> pa.Table:
    """The table of a data set, by client, split (train, validation, test) and ascending sample.

    Args:
        dataset: the clients.
        unseen: how many of them, the last ones, are held out from training; the table says so in its metadata.
    """
    rows: list[tuple[int, str, np.ndarray]] = [
        (client, split, np.asarray(places[split], dtype=np.int64))
        for client in range(dataset.num_clients)
        for places in [dataset.places(client)]
        for split in SPLITS
    ]
    counts = dataset.unlabelled_sizes()
    rows.extend((k, UNLABELLED, dataset.unlabelled_places(k)) for k in np.flatnonzero(counts).tolist())
    rows.append((-1, PUBLIC, dataset.public_places()))
    sizes = [len(samples) for _, _, samples in rows]
    splits = np.repeat(np.array([_PARTS.index(split) for _, split, _ in rows], dtype=np.int8), sizes)
    names = pa.DictionaryArray.from_arrays(pa.array(splits), pa.array(_PARTS))
    table = pa.Table.from_arrays(
        [
            pa.array(np.repeat(np.array([client for client, _, _ in rows], dtype=np.int32), sizes)),
            names.cast(pa.string()),
            pa.array(np.concatenate([samples for _, _, samples in rows])),
        ],
        schema=ASSIGNMENT_SCHEMA,
    )
    return table.replace_schema_metadata({_UNSEEN_KEY: str(unseen)}) if unseen else table


def assignment_hash(table: pa.Table) -> str:
    """SHA-256 of the table's content, the same for any file format.

    It says who owns which sample, and not which of them have labels: runs that differ only in that can be compared.
    """
    digest = hashlib.sha256()
    clients, samples = (np.ascontiguousarray(table[column].to_numpy()) for column in ("client", "sample"))
    parts = np.array([_PARTS.index(split) for split in table["split"].to_pylist()], dtype=np.int8)
    if (hidden := parts == _PARTS.index(UNLABELLED)).any():
        parts[hidden] = _PARTS.index("train")
        # in the order of a table without them: by client, of whom public samples have none and come last
        order = np.lexsort((samples, parts, np.where(clients < 0, clients.max() + 1, clients)))
        order[clients[order] < 0] = np.flatnonzero(clients < 0)
        clients, samples, parts = clients[order], samples[order], parts[order]
    for column in (clients, samples, parts):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()


def to_parquet(table: pa.Table) -> bytes:
    """The table as a Parquet file."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


class FilePartition(BaseModel):
    """The clients, splits and public samples of another run's ``partition.parquet``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["file"] = Field(default="file", description="Reuse the partition.parquet of another run.")
    path: Path = Field(description="The file. Its splits are kept, so `holdout` must be left out.")
    sha256: str | None = Field(
        default=None, description="The partition's hash, as results name it; null: any. It is checked when given."
    )

    def splits(self, num_samples: int) -> tuple[list[Places], np.ndarray]:
        """By client the indices of every split, and the public ones.

        Args:
            num_samples: N of the source.

        Raises:
            DataError: no such file, another format, another hash, an index twice or not below N, or a client without
                train samples.
        """
        table = self._read()
        found = assignment_hash(table)
        if self.sha256 not in (None, found):
            raise DataError(f"partition.sha256 is {self.sha256}, but {self.path} has {found}")
        samples = table["sample"].to_numpy()
        if samples.size and (samples.min() < 0 or samples.max() >= num_samples):
            raise DataError(
                f"{self.path} names samples up to {samples.max()}, but the source has {num_samples}: it is the "
                "partition of another data set"
            )
        if len(np.unique(samples)) < len(samples):
            raise DataError(f"{self.path} gives a sample to two clients or splits")
        clients = table["client"].to_numpy().astype(np.int64)
        parts = pc.index_in(table["split"], pa.array(_PARTS)).to_numpy()
        parts = np.where(parts == _PARTS.index(UNLABELLED), _PARTS.index("train"), parts)
        public = parts == _PARTS.index(PUBLIC)
        if ((clients < 0) != public).any() or clients.min() < -1 or clients.max() < 0:
            raise DataError(
                f"{self.path}: public samples have the client -1, all others one from 0 on; there must be one"
            )
        trained, count = np.unique(clients[parts == _PARTS.index("train")]), int(clients.max()) + 1
        if len(trained) < count:
            missing = np.append(np.flatnonzero(trained != np.arange(len(trained))), len(trained))[0]
            raise DataError(f"{self.path}: client {missing} has no train sample")
        owner = np.where(public, -1, clients * len(SPLITS) + parts)  # which split of which client
        ordered = samples[np.lexsort((samples, owner))][public.sum() :]
        pieces = np.split(ordered, np.cumsum(np.bincount(owner[~public], minlength=count * len(SPLITS)))[:-1])
        rows = (pieces[start : start + len(SPLITS)] for start in range(0, len(pieces), len(SPLITS)))
        return [dict(zip(SPLITS, row, strict=True)) for row in rows], samples[public]

    def unseen(self) -> int:
        """Returns how many clients, the last ones, the run that wrote the file held out; 0 if it does not say so.

        Raises:
            DataError: as for :meth:`splits`.
        """
        return int((self._read().schema.metadata or {}).get(_UNSEEN_KEY, 0))

    def _read(self) -> pa.Table:
        path = self.path.expanduser()
        try:
            table = pq.read_table(path)
            table.validate(full=True)
            known = {*_PARTS, None}  # None has a message of its own
            fits = table.schema.equals(ASSIGNMENT_SCHEMA) and set(table["split"].unique().to_pylist()) <= known
        except (OSError, pa.ArrowException, ValueError) as error:
            raise DataError(f"partition.path: {path} cannot be read: {error}") from error
        if not fits:
            raise DataError(f"partition.path: {path} is not a partition.parquet of rayfl")
        if not table.num_rows or any(column.null_count for column in table.columns):
            raise DataError(f"partition.path: {path} has no samples, or samples without client, split or number")
        return table
