"""What every data source of a configuration is: something that opens to samples, with or without clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

import numpy as np
from pydantic import BaseModel, ConfigDict

from rayfl.data.federated import FederatedDataset
from rayfl.data.files.content import Content, unknown
from rayfl.data.files.natural_file import open_natural
from rayfl.data.files.records import read_record
from rayfl.data.graphs import GraphRows
from rayfl.data.images.moments import Moments
from rayfl.data.sources.remarks import Remark
from rayfl.data.tables import TableOptions
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec, Target
from rayfl.randomness import RandomStreams


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples in two arrays, which may be memory-mapped and read-only.

    Attributes:
        x: inputs of shape (N, *spec.shape), float32, or uint8 standing for x / 255; graphs may be kept as edges.
        y: labels, int64 of shape (N,); or other targets, of shape (N, *spec.target_shape).
        spec: shape and kind of the inputs.
        clients: whose each sample is, N names, for samples that come with clients.
        moments: of ``x``, where they are known.
        remarks: looks for what a user should be warned of.
        table: what is done to the columns of a table; None where ``x`` is none.
        domains: names of the domains that samples are from (cameras, styles, hospitals), for data that have some.
        domain: which domain each sample is from, positions in ``domains``, int of shape (N,).
        group: which group of people each sample is of, positions in ``spec.groups``, int64 of shape (N,); None where
            the spec names no groups, and of a table, whose rows have it (``table.columns.people``).
        content: gives the checksum of the samples, where they may be others at the next start.
    """

    x: np.ndarray | GraphRows
    y: np.ndarray
    spec: InputSpec
    clients: np.ndarray | None = None
    moments: Moments | None = None
    remarks: Callable[[], Sequence[Remark]] = tuple
    table: TableOptions | None = None
    domains: tuple[str, ...] = ()
    domain: np.ndarray | None = None
    group: np.ndarray | None = None
    content: Content = unknown

    def grouped(self) -> np.ndarray | None:
        """Returns which group of people each sample is of, int64 of shape (N,); None where nothing says that."""
        if self.table is None or not self.table.columns.people:
            return self.group
        assert isinstance(self.x, np.ndarray)  # graphs are no tables
        return self.x[:, -1].astype(np.int64)


@dataclass(frozen=True)
class NaturalPath:
    """Samples that come with clients, in a file (:mod:`rayfl.data.files.natural_file`).

    Attributes:
        path: the file.
        remarks: looks for what a user should be warned of.
        table: what is done to the columns of a table; None where the inputs are none.
    """

    path: Path
    remarks: Callable[[], Sequence[Remark]] = tuple
    table: TableOptions | None = None

    def content(self) -> str | None:
        """Gives the checksum of the samples; None for a file of before there were checksums.

        Raises:
            DataError: the file, or its record, is damaged.
        """
        known = open_natural(self.path).header.sha256
        record = read_record(self.path) if known is None else None
        return known if record is None else record.content


class Decoder(Protocol):
    """Makes texts of tokens.

    Attributes:
        end: the token that ends a response; None: none does.
    """

    end: int | None

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        ...


Labels = Literal["as_found", "renumbered"]
"""How labels of a user's own become class numbers: they are these numbers, or are numbered by their rank."""

LABELS = (
    "as_found: labels are the numbers of their classes, 0 to num_classes - 1, of which some may have no sample; "
    "renumbered: the labels that occur, integers or text, are numbered from 0, in ascending order."
)


class Source(BaseModel, ABC):
    """The section ``dataset`` of a configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str

    def aimed_at(self, target: Target) -> Source:
        """The source, asked for what a task learns from; a source that has but one target is as it was."""
        return self

    def settled(self) -> Self:
        """The source with what is found out once, and recorded: this one, unless its texts need a file that is known
        by a checksum."""
        return self

    @property
    def known_spec(self) -> InputSpec | None:
        """Shape and kind of the stored inputs where they are known without the source's files; else None."""
        return None

    def class_names(self) -> tuple[str, ...]:
        """The names of an opened source's classes by number; none where they are told by numbers alone."""
        return ()

    def decoder(self) -> Decoder | None:
        """What makes texts of the samples' tokens; None where nobody knows how they are written.

        Raises:
            DataError: the tokenizer cannot be read.
        """
        return None

    @abstractmethod
    def open(self, streams: RandomStreams) -> Samples | NaturalPath | FederatedDataset:
        """The samples on this machine.

        Args:
            streams: the experiment's randomness, for sources that make their samples up.

        Raises:
            DataError: the samples are missing or damaged; says how to get them.
        """

    def official_test(self, streams: RandomStreams) -> Samples | NaturalPath:
        """The source's own test part: samples of which no client has any, or a file of clients with test rows.

        Args:
            streams: as for :meth:`open`.

        Raises:
            ConfigError: there is none (the default), or its samples are divided among the clients.
            DataError: as for :meth:`open`.
        """
        raise ConfigError(
            f"dataset {self.name!r} has no official test part: leave out evaluation.official_test and "
            "evaluation.official_personalized, or have samples set aside (long_tail.balanced_test, docs/long-tail.md)"
        )
