"""The official test part of a data set as one pooled set, for the model of the server."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rayfl.data.federated import FederatedDataset
from rayfl.data.files.natural_file import NaturalFile, open_natural
from rayfl.data.files.remedies import remedy
from rayfl.data.images.transform import Preprocessing
from rayfl.data.partitions.long_tail import LongTail
from rayfl.data.sources.base import NaturalPath, Samples, Source
from rayfl.errors import ConfigError, DataError
from rayfl.examples import Examples
from rayfl.randomness import RandomStreams

_ROWS = 4096
_WHOLE = LongTail()
OFFICIAL_PIECE = 2048
"""Samples that one host scores at a time; fixed, so that sums do not depend on the number of hosts."""


@dataclass(frozen=True, eq=False)
class OfficialTest:
    """Labelled samples that belong to no client.

    Attributes:
        samples: as they are stored; the labels are clean.
        preprocess: what they go through, the same as the clients' samples.
    """

    samples: Samples
    preprocess: Preprocessing

    def __len__(self) -> int:
        return len(self.samples.y)

    def load(self, start: int, stop: int) -> Examples:
        """The samples ``start`` to ``stop`` (excluded), as far as there are any, on the CPU as a model sees them."""
        x, y = self.preprocess(self.samples.x[start:stop]), self.samples.y[start:stop]
        group = None if self.samples.group is None else torch.from_numpy(self.samples.group[start:stop])
        return Examples(torch.from_numpy(x), torch.from_numpy(y.astype(self.samples.spec.target_type)), group)


def open_official_test(
    source: Source, dataset: FederatedDataset, streams: RandomStreams, long_tail: LongTail = _WHOLE
) -> OfficialTest:
    """The official test part that belongs to a data set, or what is set aside in its place.

    Args:
        source: where the clients' samples come from.
        dataset: the clients.
        streams: the experiment's randomness.
        long_tail: what is set aside of the source's samples, or left out of its test part.

    Raises:
        ConfigError: the source has no official test part, or its test samples are divided among the clients.
        DataError: the test part cannot be read, or does not fit the clients' samples.
    """
    opened = _set_aside(source, streams, long_tail) if long_tail.balanced_test else source.official_test(streams)
    samples = _of_file(opened) if isinstance(opened, NaturalPath) else opened
    if samples.table is not None or (isinstance(opened, NaturalPath) and opened.table is not None):
        raise ConfigError(
            f"evaluation.official_test: dataset {source.name!r} is a table, whose columns are made by what clients' "
            "training samples say; that is not done for a test part without clients: leave the option out"
        )
    if dataset.preprocess is None or not len(samples.y):
        raise ConfigError(
            f"evaluation.official_test: dataset {source.name!r} has no official test samples; leave the option out"
        )
    stored = dataset.preprocess.stored
    of_classes = stored.target == "class"
    too_many = samples.y.max() >= stored.num_classes if of_classes else samples.spec != stored
    if samples.spec.shape != stored.shape or too_many:
        raise DataError(
            f"evaluation.official_test: the test samples of dataset {source.name!r} have the shape "
            f"{samples.spec.shape} and labels up to {samples.y.max()}, but the clients' have the shape {stored.shape} "
            f"and {stored.num_classes} classes; set dataset.num_classes or leave the option out"
        )
    if long_tail.official_test == "long_tailed":
        samples = _only(samples, long_tail.thinned_test(samples.y, stored.num_classes, streams))
    return OfficialTest(samples, dataset.preprocess)


def _set_aside(source: Source, streams: RandomStreams, long_tail: LongTail) -> Samples:
    """The samples that no client has, of a source whose samples are divided."""
    opened = source.open(streams)
    assert isinstance(opened, Samples)  # a long tail of others has been refused
    return _only(opened, long_tail.divided(opened.y, opened.spec.num_classes, streams).test)


def _only(samples: Samples, kept: np.ndarray) -> Samples:
    group = None if samples.group is None else samples.group[kept]
    return replace(samples, x=samples.x[kept], y=samples.y[kept], group=group)


def _of_file(place: NaturalPath) -> Samples:
    """The test rows of all clients of a file, also of those that no run has as clients."""
    file = open_natural(place.path)
    try:
        splits = file.owners().column("split").combine_chunks()
        # a file without a test part of its own is one: the rows that were asked for
        kept = np.asarray(pc.equal(splits, "test")) if file.header.own_test else np.ones(len(file), dtype=bool)
        parts = [_rows(file, start, kept) for start in range(0, len(file), _ROWS)]
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{place.path} cannot be read: {error}; {remedy(place.path)}") from error
    shape = file.header.shape
    x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Samples(x.reshape(len(y), *shape), y, file.header.spec)


def _rows(file: NaturalFile, start: int, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    stop = min(start + _ROWS, len(file))
    x, y = file.rows(start, stop)
    return x[kept[start:stop]], y[kept[start:stop]]
