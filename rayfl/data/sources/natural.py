"""Data sets that come already divided among clients, in a file that is sorted by client name.

The file's format is described in :mod:`rayfl.data.files.natural_file`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field

from rayfl.data.federated import FederatedDataset, OnDemand
from rayfl.data.files.natural_file import (
    METADATA_KEY,
    VERSION,
    Inputs,
    NaturalHeader,
    open_natural,
    write_natural,
)
from rayfl.data.files.remedies import remedy
from rayfl.data.images.moments import Moments, moments_of
from rayfl.data.images.transform import Preprocessing, TransformConfig
from rayfl.data.partitions.base import NaturalPartition
from rayfl.data.partitions.holdout import HoldoutConfig, split_client
from rayfl.data.partitions.noise import LabelNoise
from rayfl.data.partitions.public import draw_public
from rayfl.data.sources.base import NaturalPath, Source
from rayfl.data.sources.root import data_root
from rayfl.errors import ConfigError, DataError
from rayfl.examples import SPLITS, Examples, Places
from rayfl.randomness import RandomStreams

__all__ = ["METADATA_KEY", "VERSION", "LeafSource", "NaturalDataset", "NaturalHeader", "write_natural"]

_CLEAN = LabelNoise()
_AS_STORED = TransformConfig()
_EVERYBODY = NaturalPartition()


class LeafSource(Source):
    """Configuration of a data set that keeps LEAF's own clients."""

    name: Literal["leaf"] = "leaf"
    path: Path = Field(
        description="The Parquet file that `rayfl data import-leaf` wrote. A relative path is looked up in the "
        "folder of the environment variable RAYFL_DATA (default ~/.cache/rayfl)."
    )

    @property
    def resolved_path(self) -> Path:
        """The file's place on this machine."""
        return data_root() / self.path.expanduser()

    def open(self, streams: RandomStreams) -> NaturalPath:
        """Returns where the file is."""
        return NaturalPath(self.resolved_path)

    def official_test(self, streams: RandomStreams) -> NaturalPath:
        """The file, if it has test rows of its own."""
        if not open_natural(self.resolved_path).header.own_test:
            raise ConfigError(
                f"evaluation.official_test: {self.resolved_path} has no test part of its own; leave the option out"
            )
        return NaturalPath(self.resolved_path)


class NaturalDataset(FederatedDataset):
    """Clients as the source made them; train and test stay apart as in the source.

    Clients are the names with at least one train sample, sorted, or those that ``partition`` draws of them. Of a
    client's n train samples, floor(validation * n) are drawn for validation, so a small client may have none; every
    split keeps the file's order. The file stays open; open another data set in another process.

    Args:
        path: a file of natural clients, Parquet or Arrow.
        validation: fraction of the train samples held out, in [0, 1).
        streams: the experiment's randomness; uses the stream ``holdout`` of each client, and ``public``.
        noise: wrong labels in train and validation parts; uses the stream ``noise`` of each client, and
            ``noise.clients``.
        public: number of unlabelled samples that belong to no client, drawn from the train parts.
        transform: what is done to images.
        test: fraction of the samples held out for testing, for a file without a test part of its own (null: 0.2).
        partition: which of the clients; uses the stream ``clients``.

    Raises:
        DataError: no such file, a file of another format or a newer version, rows out of order, no client with a
            train sample, fewer clients than are asked for, or ``test`` for a file that has its own test part.
        ConfigError: the transform does not fit the inputs.

    Attributes:
        untrained: names in the file without a train sample, which are no clients.
    """

    reads_ahead = True

    def __init__(
        self,
        path: Path,
        validation: float,
        streams: RandomStreams,
        public: int = 0,
        noise: LabelNoise = _CLEAN,
        transform: TransformConfig = _AS_STORED,
        test: float | None = None,
        partition: NaturalPartition = _EVERYBODY,
    ) -> None:
        if not 0 <= validation < 1:
            raise DataError(f"{path}: the validation fraction is {validation}; it must be at least 0 and below 1")
        self._path = path
        self._file = open_natural(path)
        self._header = self._file.header
        if self._header.own_test and test is not None:
            raise DataError(
                f"holdout.test: {path} comes with its own test part; set holdout.test=null (holdout.validation is "
                "taken from the train part)"
            )
        self._holdout = HoldoutConfig(test=0 if self._header.own_test else test, validation=validation)
        self._streams = streams
        self._noise = noise
        index = self._index()
        rows = {name: ranges for name, ranges in index.items() if "train" in ranges}
        if not rows:
            raise DataError(f"{path}: no client has a train sample; {remedy(path)}")
        self.untrained = tuple(name for name in index if name not in rows)
        self._rows = tuple(rows.values())
        # moments are those of the file, whichever clients are drawn
        self.preprocess: Preprocessing = transform.build(self._header.spec, self._moments)
        self.spec = self.preprocess.spec
        kept = partition.chosen(np.array([sum(map(len, ranges.values())) for ranges in self._rows]), streams)
        names = tuple(rows)
        self.names = tuple(names[position] for position in kept.tolist())
        self._rows = tuple(rows[name] for name in self.names)
        self._noise_owners = noise.owners(len(self.names), streams)
        self._last: tuple[int, Inputs, np.ndarray] | None = None
        self._taken: list[np.ndarray] = []
        if public:
            self._taken = draw_public(self.sizes()[:, 0], public, streams)

    def sizes(self) -> np.ndarray:
        """Samples by client and split: int64 of shape (K, 3), columns in the order of ``SPLITS``."""
        splits = (self._splits(client) for client in range(self.num_clients))
        return np.array([[len(rows[split]) for split in SPLITS] for rows in splits], dtype=np.int64)

    def load(self, client: int) -> Mapping[str, Examples]:
        """The three splits of one client, on the CPU.

        Images are float32 of shape (n, *shape), in [0, 1] unless normalized; tokens int64 of shape (n, *shape).

        Raises:
            DataError: the file's rows cannot be read, when a split is asked for.
        """

        def read(split: str) -> Examples:
            x, y = self._read(client)
            places = self._splits(client)[split]
            return self._examples(x(places), self._labels(client, y)[split][places])

        return OnDemand(read)

    def labels(self, client: int) -> Mapping[str, np.ndarray]:
        """The targets of one client by split; inputs are not converted."""
        y = self._read(client)[1]
        labels, places = self._labels(client, y), self._splits(client)
        return {split: self._targets(labels[split][at]) for split, at in _only(places, SPLITS)}

    def _labels(self, client: int, y: np.ndarray) -> dict[str, np.ndarray]:
        """The labels of a client's rows as each split has them, with noise or without."""
        noisy = y
        if client in self._noise_owners:
            generator = self._streams.generator("noise", client=client)
            noisy = self._noise.corrupt(y.astype(np.int64), self.spec.num_classes, generator)
        return {"train": noisy, "validation": noisy, "test": noisy if self._noise.in_test else y}

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
                parts.append(self._examples(x(places), y[places]).x)
        return torch.cat(parts)

    def public_labels(self) -> np.ndarray:
        """The labels of the public samples, without noise; inputs are not converted."""
        parts = [self.labels(0)["train"][:0]]
        for client, taken in enumerate(self._taken):
            if len(taken):
                parts.append(self._targets(self._read(client)[1][self._splits(client)["public"]]))
        return np.concatenate(parts)

    def _splits(self, client: int) -> dict[str, np.ndarray]:
        """Places of every split's samples within the client's rows."""
        train, test = len(self._rows[client]["train"]), len(self._rows[client].get("test", ()))
        splits = split_client(np.arange(train), self._holdout, self._streams.generator("holdout", client=client))
        if self._taken:
            splits["public"] = splits["train"][self._taken[client]]
            splits["train"] = np.delete(splits["train"], self._taken[client])
        return {**splits, "test": np.arange(train, train + test)} if self._header.own_test else splits

    def _index(self) -> dict[str, dict[str, range]]:
        """Rows of every client and split, in the file's order, from the two columns that name them."""
        try:
            runs = self._file.runs()
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self._path} cannot be read: {error}; {remedy(self._path)}") from error
        if not {split for _, split, _, _ in runs} <= {"train", "test"}:
            raise DataError(
                f"{self._path}: the column split holds other values than train and test; {remedy(self._path)}"
            )
        index: dict[str, dict[str, range]] = {}
        last = ""
        for name, split, start, stop in runs:
            ranges = index.setdefault(name, {})
            if name < last or split in ranges or (split == "train" and ranges):
                raise DataError(f"{self._path}: the rows of client {name!r} are not in order; {remedy(self._path)}")
            ranges[split] = range(start, stop)
            last = name
        return index

    def _read(self, client: int) -> tuple[Inputs, np.ndarray]:
        """A client's raw inputs, which decode those that are asked for, and labels, from its row groups only.

        Train comes before test.
        """
        if self._last is None or self._last[0] != client:
            ranges = self._rows[client]
            rows = range(ranges["train"].start, ranges.get("test", ranges["train"]).stop)
            try:
                # Kept, since the client's other splits are often asked for next.
                self._last = (client, *self._file.undecoded(rows.start, rows.stop))
            except (OSError, pa.ArrowException) as error:
                raise DataError(
                    f"{self._path}: client {self.names[client]!r} cannot be read: {error}; {remedy(self._path)}"
                ) from error
        return self._last[1:]

    def _moments(self) -> Moments:
        """Of all train rows of the file."""
        if self._header.moments is not None:
            return self._header.moments
        shape = self._header.shape
        parts = [
            moments_of(self._file.rows(r["train"].start, r["train"].stop)[0].reshape(-1, *shape)) for r in self._rows
        ]
        return sum(parts[1:], start=parts[0])

    def _examples(self, x: np.ndarray, y: np.ndarray) -> Examples:
        inputs = self.preprocess(x.reshape(len(y), *self._header.shape))
        return Examples(torch.from_numpy(inputs), torch.from_numpy(self._targets(y)))

    def _targets(self, y: np.ndarray) -> np.ndarray:
        return y.reshape(len(y), *self.spec.target_shape).astype(self.spec.target_type)


def _only(places: Places, splits: Iterable[str]) -> Iterable[tuple[str, np.ndarray]]:
    return [(split, places[split]) for split in splits]
