"""A user's own files as arrays: which columns there are, and every way in which their values may be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfl.data.sources.columns.files import NamedTable
from rayfl.data.sources.columns.inputs import Layout, read_inputs, refuse_nulls
from rayfl.data.sources.columns.layout import AUTO, Wanted, find_layout, unused
from rayfl.data.sources.columns.masks import read_masks
from rayfl.data.sources.columns.tables import on_rounded, read_table, with_groups
from rayfl.data.sources.columns.targets import read_targets
from rayfl.data.sources.columns.texts import TextOptions, read_texts
from rayfl.data.tables import TableColumns
from rayfl.errors import DataError
from rayfl.examples import InputSpec, Target
from rayfl.metrics.language import IGNORED


@dataclass(frozen=True, eq=False)
class Rows:
    """All rows of some files.

    Attributes:
        x: inputs of shape (N, *shape), uint8, float32 or int32 (tokens).
        y: labels, int64 of shape (N,), or other targets (N, ...).
        clients: the client of every row; None where there are no clients.
        splits: ``train`` or ``test`` for every row; None where there are no splits.
        integers: whether the inputs are lists of integers that are no pixels.
        num_labels: how many different labels there are.
        unused: columns of numbers that are left out, where the inputs, numbers too, were found by their names.
        vocabulary: number of tokens; 0 without.
        cut: how many texts were longer than they may be.
        table: what the columns of a table are; None of other inputs.
        padding: the token that fills rows up; None where none does.
        inner: how many texts have that token before others.
        known_classes: how many classes the file says there are.
        class_names: the classes' texts, where they are told by texts, by number.
        left_out: how many rows there were of which nothing could be learned.
        alike: how many more there were whose answers are all the same.
        shortened: how many conversations have but their last answer to learn.
        notes: what a user should be warned of, found where the inputs were read.
        domains: the domain of every row, where those of one follow each other; None where there are no domains.
    """

    x: np.ndarray
    y: np.ndarray
    clients: np.ndarray | None
    splits: np.ndarray | None
    integers: bool
    num_labels: int
    unused: tuple[str, ...] = ()
    vocabulary: int = 0
    cut: int = 0
    table: TableColumns | None = None
    padding: int | None = None
    inner: int = 0
    known_classes: int | None = None
    class_names: tuple[str, ...] = ()
    left_out: int = 0
    alike: int = 0
    shortened: int = 0
    notes: tuple[str, ...] = ()
    domains: np.ndarray | None = None

    def spec(self, num_classes: int, target: Target) -> InputSpec:
        """Returns what a model must know of them.

        Args:
            num_classes: of classes.
            target: what is learned.
        """
        known = {"class": num_classes, "mask": num_classes, "tokens": self.vocabulary, "survival": 1}
        known["preference"] = self.vocabulary
        outputs = known.get(target) or int(self.y.shape[-1])
        kind: Literal["image", "tokens"] = "tokens" if self.vocabulary else "image"
        return InputSpec(kind, self.x.shape[1:], outputs, self.vocabulary, target, self.padding)


def read_rows(
    tables: Sequence[NamedTable], wanted: Wanted, shape: tuple[int, ...] | None, renumbered: bool = False
) -> Rows:
    """All rows of some tables with the same columns, in their order.

    Args:
        tables: the tables.
        wanted: their columns.
        shape: shape of an input; None takes encoded images and lists as they are.
        renumbered: whether the labels, any integers or texts, are numbered from 0 by their rank.

    Raises:
        DataError: naming file, column and, counted from 0, row.
    """
    parts, layouts, left = [], [], dict[str, None]()
    for file in tables:
        if all(pa.types.is_null(kind) for kind in file.schema.types):  # of a CSV file without rows no type is known
            raise DataError(f"{file.path}: no rows, or none with values")
        layouts.append(find_layout(file.path, file.schema, wanted))
        if layouts[-1] != layouts[0]:
            raise DataError(f"{file.path}: the columns are not those of {tables[0].path} ({layouts[-1]}, {layouts[0]})")
        parts.append(file.read(layouts[0].names))
        left |= dict.fromkeys(unused(file.schema, layouts[0]) if wanted.x == AUTO else ())
    if not any(part.num_rows for part in parts):
        raise DataError(f"{', '.join(str(file.path) for file in tables)}: no rows")
    layout = layouts[0]
    filled = [(file.path, part) for file, part in zip(tables, parts, strict=True) if part.num_rows]
    clients, splits = client_names(filled, layout.client), split_names(filled, layout.split)
    known = max(
        (table.classes[name] for table in tables for name in layout.y[:1] if name in table.classes), default=None
    )
    if layout.kind in ("texts", "tokens"):
        return replace(_of_texts(filled, layout, wanted, clients, splits, renumbered), known_classes=known)
    columns, notes = None, list[str]()
    if layout.kind == "table":
        if shape is not None:
            raise DataError(
                f"{tables[0].path}: dataset.shape is {list(shape)}, but the inputs are a table's columns "
                f"({', '.join(layout.x)}), a number or a category each: leave it out"
            )
        x, columns = read_table(filled, layout.x, layout.client, wanted.missing)
        if layout.group is not None:
            x, columns = with_groups(x, columns, client_names(filled, layout.group), layout.group)
    else:
        x = read_inputs(filled, layout, shape or _shape(tables, layout.x[0]), notes)
    notes += on_rounded(filled, layout.x if layout.kind in ("numbers", "table") else ())
    about: dict[str, Any] = {"table": columns, "known_classes": known, "notes": tuple(notes)}
    if wanted.target == "mask":
        y, count = read_masks(filled, layout.y[0], layout.client, x.shape[1:], renumbered, wanted.ignore)
    else:
        y, count, about["class_names"] = _targets(filled, layout, wanted, renumbered)
    integers = layout.kind == "lists" and _of_integers(filled[0][1].schema.field(layout.x[0]).type)
    return Rows(x, y, clients, splits, integers, count, tuple(left), **about)


def _shape(tables: Sequence[NamedTable], name: str) -> tuple[int, ...] | None:
    """The shape that all tables know a column's values to have; None where they know none."""
    first = tables[0].shapes.get(name)
    for table in tables:
        if (other := table.shapes.get(name)) != first:
            raise DataError(
                f"{table.path}: column {name!r} has arrays of the shape {other}, but {tables[0].path} has {first}"
            )
    return first


def _targets(
    filled: Sequence[tuple[Path, pa.Table]], layout: Layout, wanted: Wanted, renumbered: bool
) -> tuple[np.ndarray, int, tuple[str, ...]]:
    """Returns what is learned; and of classes, how many different ones there are, and their names if they have any."""
    parts = [read_targets(path, table, layout.y, wanted.target, layout.client, renumbered) for path, table in filled]
    for (path, _), part in zip(filled, parts, strict=True):
        if part.dtype.kind != parts[0].dtype.kind:
            raise DataError(
                f"{path}: column {layout.y[0]!r} holds {_kind(part)}, but that of {filled[0][0]} {_kind(parts[0])}: "
                "store one kind in all files"
            )
    y = np.concatenate(parts)
    if wanted.target != "class":
        return y, 0, ()
    present, numbers = np.unique(y, return_inverse=True)
    names = tuple(map(str, present)) if y.dtype.kind == "U" else ()
    return numbers.astype(np.int64) if renumbered else y, len(present), names


def _kind(values: np.ndarray) -> str:
    return "text" if values.dtype.kind == "U" else "numbers"


def _of_texts(
    filled: Sequence[tuple[Path, pa.Table]],
    layout: Layout,
    wanted: Wanted,
    clients: np.ndarray | None,
    splits: np.ndarray | None,
    renumbered: bool,
) -> Rows:
    count = sum(table.num_rows for _, table in filled)
    training = np.ones(count, dtype=bool) if splits is None else splits == "train"
    following = wanted.target == "tokens"
    length = wanted.length + 1 if following and wanted.length is not None else wanted.length
    choice = TextOptions(
        None if layout.kind == "tokens" else wanted.tokenizer, length, wanted.vocabulary, wanted.padding
    )
    found = read_texts(filled, layout.x[0], layout.client, training, choice)
    about: dict[str, Any] = {
        "vocabulary": found.vocabulary,
        "cut": found.cut,
        "padding": found.padding,
        "inner": found.inner,
    }
    if following:
        if found.x.shape[1] < 2:
            raise DataError(f"{filled[0][0]}: column {layout.x[0]!r} has no text of two tokens: none has a next one")
        asked = np.arange(1, found.x.shape[1]) < found.lengths[:, np.newaxis]
        y = np.where(asked, found.x[:, 1:], IGNORED)
        return Rows(found.x[:, :-1], y, clients, splits, False, 0, **about)
    y, labels, about["class_names"] = _targets(filled, layout, wanted, renumbered)
    return Rows(found.x, y, clients, splits, False, labels, **about)


def _of_integers(kind: pa.DataType) -> bool:
    """Returns whether lists are of integers other than uint8, which are pixels."""
    return bool(pa.types.is_integer(kind.value_type) and kind.value_type != pa.uint8())


def _text(path: Path, table: pa.Table, name: str) -> np.ndarray | None:
    """A column of names; None if all are null, as NaN is, which some programs write of names that are missing."""
    column = table.column(name)
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    if column.null_count == len(column):
        return None
    refuse_nulls(path, table, name, part=column)
    try:
        return np.array(column.cast(pa.string()).to_pylist(), dtype=object)
    except pa.ArrowException as error:
        raise DataError(f"{path}: column {name!r} has the type {column.type}; it must hold text or integers") from error


def client_names(filled: Sequence[tuple[Path, pa.Table]], name: str | None) -> np.ndarray | None:
    """The client of every row, from a column of names; None where there is none, or all of it is null.

    Raises:
        DataError: some names are missing, naming file, column and row.
    """
    if name is None:
        return None
    parts = [_text(path, table, name) for path, table in filled]
    if all(part is None for part in parts):
        return None
    for (path, _), part in zip(filled, parts, strict=True):
        if part is None:
            raise DataError(f"{path}: column {name!r} is null in all rows, but not so in the other files")
        if not all(part):
            raise DataError(f"{path}: column {name!r}, row {list(map(bool, part)).index(False)} is an empty name")
    return np.concatenate([part for part in parts if part is not None])


def split_names(filled: Sequence[tuple[Path, pa.Table]], name: str | None) -> np.ndarray | None:
    """``train`` or ``test`` for every row, from a column; None where there is none, or all of it is null.

    Raises:
        DataError: there is another value, naming file, column and row.
    """
    splits = client_names(filled, name)
    if splits is None:
        return None
    start = 0
    for path, table in filled:
        for row, split in enumerate(splits[start : start + table.num_rows]):
            if split not in ("train", "test"):
                raise DataError(f"{path}: column {name!r}, row {row} is {split!r}; it must be train or test")
        start += table.num_rows
    return splits
