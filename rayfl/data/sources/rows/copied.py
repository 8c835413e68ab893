"""Sources of rows, of which a copy is made at the first use that is read in place."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from rayfl.data.files.natural_file import open_natural
from rayfl.data.files.records import SourceFile, read_record, write_record
from rayfl.data.files.whole import locked
from rayfl.data.sources.base import NaturalPath, Samples
from rayfl.data.sources.columns.reading import Rows
from rayfl.data.sources.preparation.pooled_file import Part, PooledFile
from rayfl.data.sources.preparation.pooled_writing import write_pooled
from rayfl.data.sources.preparation.preparing import (
    PREPARED,
    Order,
    PreparableSource,
    check_part,
    is_prepared,
    no_checksum,
)
from rayfl.data.sources.remarks import Remark
from rayfl.data.sources.root import nor_here
from rayfl.data.sources.rows.client_rows import write_clients
from rayfl.data.tables import TableColumns, TableOptions
from rayfl.errors import DataError
from rayfl.examples import Target
from rayfl.randomness import RandomStreams

_KEY_DIGITS = 12


class CopiedSource(PreparableSource):
    """A source that reads rows from files and keeps them as a prepared file.

    The copy's name depends on the options and on the files' sizes and times, so it is made again when they change.
    """

    part: Part = Field(
        default="both",
        description="The rows that are used, by split. With clients, both keeps the division; train or test takes "
        "these rows only, and each client's test part is drawn from them. Without clients, both divides train and "
        "test rows among the clients, with a warning.",
    )

    ignoring_splits: ClassVar[str] = "dataset.split=none"
    """What says that the division into train and test does not count."""

    @property
    @abstractmethod
    def files(self) -> tuple[Path, ...]:
        """The files on this machine."""

    @property
    def on_record(self) -> tuple[Path, ...]:
        """The files whose checksums the copy's record has."""
        return self.files

    @abstractmethod
    def _choices(self) -> Mapping[str, Any]:
        """The options that chose what is in the copy, as plain data."""

    @abstractmethod
    def _rows(self) -> Rows:
        """All rows of all splits.

        Raises:
            DataError: naming file, column, row, client and the fix.
        """

    @abstractmethod
    def _remarks(self, rows: Rows, num_classes: int) -> list[Remark]:
        """Returns what a user should be warned of."""

    def _noted(self) -> dict[str, Any]:
        """Returns what the copy's record says of how it was made, as plain data."""
        return self.model_dump(mode="json")

    def _num_classes(self, rows: Rows) -> int:
        """Returns how many classes there are; 0 where none are learned."""
        return int(rows.y.max()) + 1 if self._learns == "class" else 0

    @property
    def _learns(self) -> Target:
        return "class"

    def _table(self, columns: TableColumns) -> TableOptions:
        """Returns what is done to the columns of a table."""
        return TableOptions(columns)

    @property
    def prepared_path(self) -> Path:
        """The copy that is read in place; its name depends on the options and on the files' sizes and times.

        Raises:
            DataError: a file does not exist.
        """
        try:
            stats = [path.stat() for path in self.files]
        except OSError as error:
            raise DataError(
                f"dataset.path: {error.filename} cannot be read: {error.strerror}{nor_here(Path(error.filename))}; put "
                "the file there, or give its path"
            ) from error
        files = [(str(path), s.st_size, s.st_mtime_ns) for path, s in zip(self.files, stats, strict=True)]
        options = dict(self._choices())
        key = hashlib.sha256(json.dumps([files, options], sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]
        return self.resolved_root / PREPARED / f"{self.name}-{key}.arrow"

    def open(self, streams: RandomStreams | None = None) -> Samples | NaturalPath:
        """The samples, with clients or without, from the copy, which is made first where it is missing."""
        self._check_there()
        path = self._copied(Order())
        record = read_record(path)
        options = {} if record is None else record.options

        def remarks() -> list[Remark]:
            return [Remark(text, scale) for text, scale in options.get("remarks", ())]

        table = None
        if (columns := options.get("table")) is not None:
            table = self._table(TableColumns(**{name: tuple(values) for name, values in columns.items()}))
        if options.get("clients"):
            return NaturalPath(path, remarks, table)
        pooled = PooledFile(path)
        mixed = self._on_test_rows({part: header.rows for part, header in pooled.header.parts.items()})
        return replace(pooled.samples("both"), remarks=lambda: [*mixed, *remarks()], table=table)

    def class_names(self) -> tuple[str, ...]:
        """See the base class."""
        record = read_record(self.prepared_path)
        return () if record is None else tuple(record.options.get("classes", ()))

    def _on_test_rows(self, rows: Mapping[str, int]) -> list[Remark]:
        """Names rows of the split ``test`` that clients train on; a configuration does not tell who asked for them.

        Args:
            rows: by split, how many rows without clients there are.
        """
        if type(self).model_fields["part"].default != "both" or rows.keys() != {"train", "test"}:
            return []
        return [
            Remark(
                f"{rows['test']} of {sum(rows.values())} samples are of the split test, and are divided among the "
                "clients like those of the split train: set dataset.part=train to leave them out "
                "(evaluation.official_test then scores the server's model on them), or say with "
                f"{self.ignoring_splits} that the division does not count"
            )
        ]

    def official_test(self, streams: RandomStreams) -> Samples | NaturalPath:
        """The rows of the split ``test``: of clients that keep the division, or of nobody with ``part=train``."""
        opened = self.open(streams)
        if isinstance(opened, NaturalPath) and open_natural(opened.path).header.own_test:
            return opened
        check_part(self.part)
        return self._other_part("test", opened).open(streams)

    def _other_part(self, part: Part, opened: Samples | NaturalPath) -> CopiedSource:
        """The source of another part, whose samples are as those of the part that is open."""
        return self.model_copy(update={"part": part})

    def _check_there(self) -> None:
        """Raises a DataError that says how to get the files, where they are not there."""

    def prepare(self, order: Order) -> Path:
        """Makes the copy."""
        if order.place is not None:
            raise DataError(f"--source: the files of {self.name} are given by path=FILE or paths=[FILE, ...]")
        no_checksum(order, f"the files of {self.name} are your own")
        return self._copied(order)

    def _copied(self, order: Order) -> Path:
        path = self.prepared_path
        if _is_whole(path, order):  # without the lock, which needs a writable folder
            return path
        with locked(path, lambda: order.progress(f"waiting for another process that prepares {path.name}", 0, None)):
            if _is_whole(path, order):
                return path
            order.progress(f"reading {', '.join(file.name for file in self.files)}", 0, None)
            rows = self._of_part(self._rows())
            num_classes = self._num_classes(rows)
            spec = rows.spec(num_classes, self._learns)
            source = ", ".join(map(str, self.files))
            if rows.clients is None:
                own = _by_split(rows)
                parts = {part: (rows.x[chosen], rows.y[chosen]) for part, chosen in own.items()}
                domains = {part: _domains(rows, chosen) for part, chosen in own.items()}
                content = write_pooled(path, self.name, parts, spec.num_classes, source, spec, domains).sha256
            else:
                content = write_clients(path, rows, spec, own_test=self.part == "both", source=source, kind=self.name)
            options = {**self._noted(), "clients": rows.clients is not None}
            options["remarks"] = self._remarks(rows, num_classes)
            if rows.class_names:
                options["classes"] = rows.class_names
            if rows.table is not None:
                options["table"] = asdict(rows.table)
            write_record(path, content, source, tuple(map(SourceFile.of, self.on_record)), options)
        return path

    def _of_part(self, rows: Rows) -> Rows:
        """The rows of :attr:`part`."""
        if self.part == "both":
            return rows
        if rows.splits is None:
            raise DataError(f"dataset.part is {self.part}, but {self.files[0]} has no column of splits; set it to both")
        own = rows.splits == self.part
        if not own.any():
            raise DataError(f"dataset.part: no row of {', '.join(map(str, self.files))} has the split {self.part}")
        clients = None if rows.clients is None else rows.clients[own]
        domains = None if rows.domains is None else rows.domains[own]
        return replace(rows, x=rows.x[own], y=rows.y[own], clients=clients, domains=domains, splits=None)


def _is_whole(path: Path, order: Order) -> bool:
    """Returns whether the copy is there, and was looked at; older releases left out columns without a word."""
    if not is_prepared(path, order):
        return False
    record = read_record(path)
    known = record is not None and "remarks" in record.options
    return record is not None and known and "groups" in record.options.get("table", {"groups": ()})


def _by_split(rows: Rows) -> dict[str, np.ndarray | slice]:
    """Which rows are of a part; train before test."""
    if rows.splits is None:
        return {"train": slice(None)}
    parts = {part: rows.splits == part for part in ("train", "test")}
    return {part: own for part, own in parts.items() if own.any()}


def _domains(rows: Rows, own: np.ndarray | slice) -> dict[str, int]:
    """How many of some rows each domain has, in their order."""
    return {} if rows.domains is None else dict(Counter(rows.domains[own].tolist()))
