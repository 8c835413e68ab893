"""Sources with official parts that are prepared once and then read in place."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from rayfl.data.files.records import SourceFile, read_record, record_path, write_record
from rayfl.data.files.whole import locked
from rayfl.data.sources.base import Samples, Source
from rayfl.data.sources.preparation.download import Progress, silent
from rayfl.data.sources.preparation.pooled_file import Part, PooledFile, PooledHeader
from rayfl.data.sources.preparation.pooled_writing import write_pooled
from rayfl.data.sources.root import data_root
from rayfl.errors import ConfigError, DataError
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams

PREPARED = "prepared"
"""The folder of prepared files inside a data root."""


@dataclass(frozen=True)
class Order:
    """What ``rayfl data prepare`` was asked for.

    Attributes:
        place: path or address to take the source's files from; None for their usual address.
        sha256: what the file at ``place`` must have.
        offline: download nothing.
        force: prepare again what is prepared already.
        progress: told how far it is.
    """

    place: str | None = None
    sha256: str | None = None
    offline: bool = False
    force: bool = False
    progress: Progress = silent


@dataclass(frozen=True)
class RawFiles:
    """Where a source's files are.

    Attributes:
        folder: what :meth:`PreparedSource._write` is given.
        files: those to put on record.
    """

    folder: Path
    files: tuple[Path, ...]


@dataclass(frozen=True, eq=False)
class PartRows:
    """An official part of a data set.

    Attributes:
        x: uint8 of shape (n, *shape).
        y: int64 of shape (n,), or float32 of shape (n, L) of several labels each.
        domains: of data that have some, the domains in the order of the rows, and how many rows each has.
    """

    x: np.ndarray
    y: np.ndarray
    domains: Mapping[str, int] = field(default_factory=dict)


class PreparableSource(Source):
    """A source with a prepared file in a data root.

    Attributes:
        root: the data root as the configuration names it.
    """

    root: Path | None = Field(
        default=None,
        description="Folder with the source's files, and with prepared/ for prepared ones. A relative path that does "
        "not exist in the working directory is looked up in the data root, which is also the default: the folder of "
        "the environment variable RAYFL_DATA, or ~/.cache/rayfl.",
    )

    @property
    def resolved_root(self) -> Path:
        """The folder on this machine."""
        if self.root is None:
            return data_root()
        root = self.root.expanduser()
        return root if root.exists() else data_root() / root

    @abstractmethod
    def prepare(self, order: Order) -> Path:
        """Makes the prepared file where it is missing and returns its path.

        Raises:
            DataError: the source's files cannot be got or read, or nothing can be written.
        """


class PreparedSource(PreparableSource):
    """Samples of an official train and test part, which one prepared file holds."""

    part: Part = Field(
        default="train",
        description="The official part whose samples are divided among the clients; both: train, then test.",
    )

    @property
    def parts(self) -> tuple[str, ...]:
        """Returns the official parts that there are."""
        return "train", "test"

    @property
    def known_spec(self) -> InputSpec | None:
        """See the base class."""
        return self._spec

    @property
    def prepared_path(self) -> Path:
        """Returns where the prepared file is, or would be."""
        return self.resolved_root / PREPARED / f"{self._stem}.arrow"

    def official_test(self, streams: RandomStreams) -> Samples:
        """The part ``test``, if there is one and the clients have the part ``train``."""
        if "test" not in self.parts:
            raise ConfigError(
                f"dataset {self.name!r} has no official test part: leave out evaluation.official_test and "
                "evaluation.official_personalized"
            )
        check_part(self.part)
        return self.model_copy(update={"part": "test"}).open(streams)

    @abstractmethod
    def open(self, streams: RandomStreams | None = None) -> Samples:
        """The samples of :attr:`part`.

        Raises:
            DataError: they are not there, or are damaged.
        """

    def prepare(self, order: Order) -> Path:
        """Gets the source's files, unless they are there, and writes all parts into the prepared file."""
        path = self.prepared_path
        with locked(path, lambda: order.progress(f"waiting for another process that prepares {path.name}", 0, None)):
            if is_prepared(path, order):
                _check_same(path, order)
                return path
            raw = self._obtain(order)
            source = order.place or str(raw.folder)
            header = self._write(path, raw.folder, source, order.progress)
            files = tuple(SourceFile.of(file) for file in raw.files)
            write_record(path, header.sha256, source, files, self._choices())
        return path

    def how_to_prepare(self) -> str:
        """The command that makes the prepared file, as advice."""
        options = [f" {shlex.quote(f'{key}={value}')}" for key, value in self._choices().items() if key != "name"]
        root = "" if self.root is None else f" --root {shlex.quote(str(self.resolved_root))}"
        return (
            f"make it with `rayfl data prepare {self.name}{''.join(options)}{root}` (add --source for files you have), "
            "or set the source's root or RAYFL_DATA to the folder that has it"
        )

    @property
    def _stem(self) -> str:
        return self.name

    @property
    @abstractmethod
    def _spec(self) -> InputSpec:
        """Shape of the inputs and number of classes."""

    def _choices(self) -> Mapping[str, str]:
        """The options that chose what is in the prepared file."""
        return {"name": self.name}

    @abstractmethod
    def _obtain(self, order: Order) -> RawFiles:
        """The source's own files, downloaded if need be."""

    @abstractmethod
    def _write(self, path: Path, folder: Path, source: str, progress: Progress) -> PooledHeader:
        """Writes the prepared file.

        Args:
            path: the prepared file.
            folder: of the source's own files.
            source: where these are from, for the record.
            progress: told how far it is.

        Raises:
            DataError: the files cannot be read, or nothing can be written.
        """


class ImageSource(PreparedSource):
    """Labelled images that fit into memory."""

    reads_directly: ClassVar[bool] = True
    """Whether the source's own files can be read at every start, which costs time and memory in every process."""

    def open(self, streams: RandomStreams | None = None) -> Samples:
        """The samples of :attr:`part`: memory-mapped if they are prepared, else read from the source's own files.

        Raises:
            DataError: there is neither, or they are damaged.
        """
        if self.prepared_path.exists():
            return PooledFile(self.prepared_path).samples(self.part)
        if not self.reads_directly:
            raise DataError(f"{self.prepared_path} does not exist; {self.how_to_prepare()}")
        parts = [self._read(self.resolved_root, part) for part in _parts(self.part)]
        x, y = (np.concatenate(arrays) if len(parts) > 1 else arrays[0] for arrays in zip(*parts, strict=True))
        return Samples(x, y, self._spec)

    def _write(self, path: Path, folder: Path, source: str, progress: Progress) -> PooledHeader:
        found = {part: self._rows(folder, part, progress) for part in self.parts}
        parts = {part: (rows.x, rows.y) for part, rows in found.items()}
        domains = {part: rows.domains for part, rows in found.items()}
        spec = self._spec
        return write_pooled(path, self._stem, parts, spec.num_classes, source, spec, domains)

    def _rows(self, folder: Path, part: str, progress: Progress) -> PartRows:
        """Returns what is written of a part."""
        return PartRows(*self._read(folder, part, progress))

    @abstractmethod
    def _read(self, folder: Path, part: str, progress: Progress = silent) -> tuple[np.ndarray, np.ndarray]:
        """x uint8 of shape (n, *shape) and y of a part (see :class:`PartRows`), from the source's own files."""


def _parts(part: Part) -> tuple[str, ...]:
    return ("train", "test") if part == "both" else (part,)


def check_part(part: Part) -> None:
    """Refuses an official test part whose samples the clients have.

    Raises:
        ConfigError: the clients' samples are not those of the part ``train`` alone.
    """
    if part != "train":
        raise ConfigError(
            f"evaluation.official_test: dataset.part is {part}, so the clients have the test samples themselves; set "
            "dataset.part=train"
        )


def is_prepared(path: Path, order: Order) -> bool:
    """Returns whether a prepared file is there, with its record, and is not to be made again."""
    return path.exists() and record_path(path).exists() and not order.force


def _check_same(path: Path, order: Order) -> None:
    """Refuses an order for other files than those that a prepared file was made from."""
    record = read_record(path)
    assert record is not None
    again = "add --force to prepare it again, or leave out"
    if order.place not in (None, record.source):
        raise DataError(f"{path} is prepared already, from {record.source}; {again} --source")
    if order.sha256 not in (None, *(file.sha256 for file in record.files)):
        raise DataError(f"{path} is prepared already, from files with other checksums; {again} --sha256")


def no_checksum(order: Order, what: str) -> None:
    """Refuses a checksum where it would not be used.

    Raises:
        DataError: there is one.
    """
    if order.sha256 is not None:
        raise DataError(f"--sha256 is for a single file, but {what}; leave it out")
