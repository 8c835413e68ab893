"""A user's own Parquet files."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from rayfl.data.files.natural_file import open_natural
from rayfl.data.files.records import SourceFile, read_record, write_record
from rayfl.data.files.whole import locked
from rayfl.data.sources.base import LABELS, Labels, NaturalPath, Samples
from rayfl.data.sources.client_rows import write_clients
from rayfl.data.sources.column_layout import AUTO, Wanted
from rayfl.data.sources.column_tables import Missing
from rayfl.data.sources.column_texts import tokenizer_file
from rayfl.data.sources.columns import Rows, read_rows
from rayfl.data.sources.pooled_file import Part, PooledFile, write_pooled
from rayfl.data.sources.preparing import PREPARED, Order, PreparableSource, check_part, is_prepared, no_checksum
from rayfl.data.sources.remarks import Remark, on_columns, remarks_on
from rayfl.data.sources.root import data_root
from rayfl.data.sources.targets import WANTED
from rayfl.data.sources.targets import Wanted as TargetOption
from rayfl.data.tables import Standardize, TableColumns, TableOptions
from rayfl.errors import DataError
from rayfl.examples import Target
from rayfl.randomness import RandomStreams

_KEY_DIGITS = 12
_YOUNGER = ("labels", "kind", "tokenizer", "length", "vocabulary", "missing")


class ParquetSource(PreparableSource):
    """Configuration of your own Parquet or CSV files: a row is a sample; columns x (image), y (label), client, split.

    With clients they are kept (partition ``natural``), with the source's division into train and test if there is a
    column ``split``; without clients the samples are pooled. Inputs are lists of numbers, several numeric columns whose
    names begin with x, raw bytes of a known ``shape``, or encoded images (PNG, JPEG, WebP). Values of the type uint8
    stand for x / 255; all others are taken as they are. At the first use a copy is made in the data root that is read
    in place; it is made again when a file or an option changes.
    """

    name: Literal["parquet"] = Field(default="parquet", description="Your own Parquet files.")
    path: Path | None = Field(
        default=None,
        description="The file. A relative path that does not exist in the working directory is looked up in the data "
        "root.",
    )
    paths: tuple[Path, ...] = Field(default=(), description="Several files with the same columns, in place of path.")
    x: str | tuple[str, ...] = Field(
        default=AUTO,
        description="Column of the inputs, or several with a number or a category (text, true and false) each, in "
        "their order; auto: x, image, img, or all x... columns, which must be numbers; of texts: text or x.",
    )
    y: str | tuple[str, ...] = Field(
        default=AUTO,
        description="Column of the labels, integers from 0; of several labels and of numbers also several columns, or "
        "one of lists; auto: y or label, or of those all y... columns that are numbered.",
    )
    target: TargetOption = Field(default="auto", description=WANTED)
    kind: Literal["auto", "tokens"] = Field(
        default="auto", description="auto: by the columns' types; tokens: the inputs are lists of tokens, 0 is padding."
    )
    tokenizer: str | None = Field(
        default=None,
        description="How texts become tokens: words or characters, learned from the training rows, or a tokenizer.json "
        "of the library tokenizers, or a folder with one; null: the inputs are no texts.",
    )
    length: int | None = Field(
        default=None, ge=1, description="Tokens of a text; longer ones are cut; null: those of the longest."
    )
    vocabulary: int | None = Field(
        default=None, ge=3, description="Of texts: most tokens that are learned; of tokens: how many there are."
    )
    missing: Missing = Field(
        default="error",
        description="Missing numbers: error; mean: the mean of the training samples; indicator: that, and a column "
        "that says where.",
    )
    standardize: Standardize = Field(
        default="none",
        description="Numbers of named columns get mean 0 and standard deviation 1 by the moments of the training "
        "samples of all clients (global), or of each client's own (client).",
    )
    labels: Labels = Field(default="as_found", description=LABELS)
    client: str = Field(
        default=AUTO, description="Column of the clients' names; auto: client, if there is one; none: pool the samples."
    )
    split: str = Field(
        default=AUTO, description="Column with train or test; auto: split, if there is one; none: ignore the division."
    )
    shape: tuple[int, ...] | None = Field(
        default=None,
        description="Shape of an input, channels first, such as [1, 28, 28]; needed for raw bytes, else null.",
    )
    num_classes: int | None = Field(default=None, ge=1, description="Number of labels; null: the largest label plus 1.")
    part: Part = Field(
        default="both",
        description="The rows that are used, by split. With clients, both keeps the division; train or test takes "
        "these rows only, and each client's test part is drawn from them.",
    )

    @model_validator(mode="after")
    def _one_way(self) -> ParquetSource:
        if (self.path is None) == (not self.paths):
            raise ValueError("give either path, a file, or paths, several files")
        if self.shape is not None and (not self.shape or min(self.shape) < 1):
            raise ValueError("shape must be a list of numbers of at least 1")
        if self.kind == "tokens" and self.tokenizer is not None:
            raise ValueError("tokenizer makes tokens of texts, but with kind=tokens they are there: leave one out")
        texts = self.kind == "tokens" or self.tokenizer is not None
        for option in ("length", "vocabulary"):
            if getattr(self, option) is not None and not texts:
                raise ValueError(f"{option} is for texts: set tokenizer, or kind=tokens, or leave it out")
        for option in ("missing", "standardize"):
            if texts and getattr(self, option) != type(self).model_fields[option].default:
                raise ValueError(f"{option} is for numbers, and the inputs are texts: leave it out")
        if self.labels == "renumbered" and (texts or self.target not in ("auto", "class")):
            raise ValueError("labels=renumbered is for classes of numbers or images: leave it out")
        return self

    def aimed_at(self, target: Target) -> ParquetSource:
        """See the base class."""
        return self.model_copy(update={"target": target}) if self.target == "auto" else self

    @property
    def _target(self) -> Target:
        return "class" if self.target == "auto" else self.target

    @property
    def files(self) -> tuple[Path, ...]:
        """The files on this machine."""
        given = self.paths if self.path is None else (self.path,)
        return tuple(_located(path.expanduser()) for path in given)

    @property
    def prepared_path(self) -> Path:
        """The copy that is read in place; its name depends on the options and on the files' sizes and times.

        Raises:
            DataError: a file does not exist.
        """
        try:
            stats = [path.stat() for path in self.files]
        except OSError as error:
            raise DataError(f"dataset.path: {error.filename} cannot be read: {error.strerror}") from error
        files = [(str(path), s.st_size, s.st_mtime_ns) for path, s in zip(self.files, stats, strict=True)]
        # Younger options are left out at their defaults, so that copies from before are found; moments need no copy.
        younger = {name for name in _YOUNGER if getattr(self, name) == type(self).model_fields[name].default}
        younger |= {"target"} if self._target == "class" else set()
        options = self.model_dump(mode="json", exclude={"root", "path", "paths", "standardize", *younger})
        if self.standardize != "none":
            options["named"] = True
        if (tokenizer := tokenizer_file(self.tokenizer)) is not None and tokenizer.is_file():
            options["tokenizer_changed"] = tokenizer.stat().st_mtime_ns
        key = hashlib.sha256(json.dumps([files, options], sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]
        return self.resolved_root / PREPARED / f"parquet-{key}.arrow"

    def open(self, streams: RandomStreams | None = None) -> Samples | NaturalPath:
        """The samples, with clients or without, from the copy, which is made first where it is missing."""
        path = self.prepare(Order())
        record = read_record(path)
        options = {} if record is None else record.options

        def remarks() -> list[Remark]:
            return [Remark(text, scale) for text, scale in options.get("remarks", ())]

        table = None
        if (columns := options.get("table")) is not None:
            known = TableColumns(**{name: tuple(values) for name, values in columns.items()})
            table = TableOptions(known, self.standardize, self.missing == "indicator")
        if options.get("clients"):
            return NaturalPath(path, remarks, table)
        return replace(PooledFile(path).samples("both"), remarks=remarks, table=table)

    def official_test(self, streams: RandomStreams) -> Samples | NaturalPath:
        """The rows of the split ``test``: of clients that keep the division, or of nobody with ``part=train``."""
        opened = self.open(streams)
        if isinstance(opened, NaturalPath) and open_natural(opened.path).header.own_test:
            return opened
        check_part(self.part)
        num_classes = opened.spec.num_classes if isinstance(opened, Samples) else self.num_classes
        return self.model_copy(update={"part": "test", "num_classes": num_classes}).open(streams)

    def prepare(self, order: Order) -> Path:
        """Makes the copy."""
        if order.place is not None:
            raise DataError("--source: the files of parquet are given by path=FILE or paths=[FILE, ...]")
        no_checksum(order, "the files of parquet are your own")
        path = self.prepared_path
        if _is_whole(path, order):  # without the lock, which needs a writable folder
            return path
        with locked(path, lambda: order.progress(f"waiting for another process that prepares {path.name}", 0, None)):
            if _is_whole(path, order):
                return path
            order.progress(f"reading {', '.join(file.name for file in self.files)}", 0, None)
            rows = self._rows()
            num_classes = self._num_classes(rows)
            spec = rows.spec(num_classes, self._target)
            source = ", ".join(map(str, self.files))
            if rows.clients is None:
                content = write_pooled(path, self.name, _by_split(rows), spec.num_classes, source, spec).sha256
            else:
                content = write_clients(path, rows, spec, own_test=self.part == "both", source=source)
            options = {**self.model_dump(mode="json"), "clients": rows.clients is not None}
            options["remarks"] = self._remarks(rows, num_classes)
            if rows.table is not None:
                options["table"] = asdict(rows.table)
            write_record(path, content, source, tuple(map(SourceFile.of, self.files)), options)
        return path

    def _rows(self) -> Rows:
        """The rows of :attr:`part`."""
        renumbered = self.labels == "renumbered"
        named = self.standardize != "none" or self.missing != "error"
        wanted = Wanted(
            self.client, self.split, self.x, self.y, self._target, self.kind == "tokens", self.tokenizer, self.length,
            self.vocabulary, self.missing, named,
        )  # fmt: skip
        rows = read_rows(self.files, wanted, self.shape, renumbered)
        if self.part == "both":
            return rows
        if rows.splits is None:
            raise DataError(f"dataset.part is {self.part}, but {self.files[0]} has no column of splits; set it to both")
        own = rows.splits == self.part
        if not own.any():
            raise DataError(f"dataset.part: no row of {', '.join(map(str, self.files))} has the split {self.part}")
        clients = None if rows.clients is None else rows.clients[own]
        return replace(rows, x=rows.x[own], y=rows.y[own], clients=clients, splits=None)

    def _remarks(self, rows: Rows, num_classes: int) -> list[Remark]:
        if rows.vocabulary:
            cut = f"{rows.cut} of {len(rows.x)} texts are longer than {rows.x.shape[1]} tokens and were cut"
            return [Remark(f"{cut}: raise dataset.length to keep them whole")] if rows.cut else []
        if self._target != "class" or rows.table is not None:
            return on_columns(rows.unused)
        return remarks_on(rows.x, rows.y, num_classes, self.num_classes is None, rows.integers, rows.unused)

    def _num_classes(self, rows: Rows) -> int:
        if self._target != "class":
            if self.num_classes is not None:
                raise DataError("dataset.num_classes is for classes, and there are none: leave it out")
            return 0
        needed = int(rows.y.max()) + 1 if self.labels == "as_found" else rows.num_labels
        if self.num_classes is not None and needed > self.num_classes:
            found = f"there is a label {needed - 1}" if self.labels == "as_found" else f"there are {needed} labels"
            raise DataError(f"dataset.num_classes is {self.num_classes}, but {found}; labels are integers from 0")
        return self.num_classes or needed


def _is_whole(path: Path, order: Order) -> bool:
    """Whether the copy is there, and was looked at; older releases left out columns without a word."""
    if not is_prepared(path, order):
        return False
    record = read_record(path)
    return record is not None and "remarks" in record.options


def _located(path: Path) -> Path:
    return path.absolute() if path.exists() else data_root() / path


def _by_split(rows: Rows) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Train before test."""
    if rows.splits is None:
        return {"train": (rows.x, rows.y)}
    parts = {part: rows.splits == part for part in ("train", "test")}
    return {part: (rows.x[own], rows.y[own]) for part, own in parts.items() if own.any()}
