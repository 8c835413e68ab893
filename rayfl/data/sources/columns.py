"""A user's own Parquet files as arrays: which columns there are, and every way in which their values may be wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayfl.data.sources.column_inputs import Layout, read_inputs, refuse_nulls
from rayfl.errors import DataError

AUTO, NONE = "auto", "none"
_INPUTS, _LABELS = ("x", "image", "img"), ("y", "label")
_PREFIX = re.compile(r"x[\W_]?\w+")


@dataclass(frozen=True)
class Wanted:
    """Which columns are meant; ``auto`` finds them by name, ``none`` (clients and splits only) leaves them out.

    Attributes:
        client: the column with the client's name.
        split: the column with ``train`` or ``test``.
        x: the column with the inputs, or several with a number each.
        y: the column with the labels.
    """

    client: str = AUTO
    split: str = AUTO
    x: str | tuple[str, ...] = AUTO
    y: str = AUTO


@dataclass(frozen=True, eq=False)
class Rows:
    """All rows of some files.

    Attributes:
        x: inputs of shape (N, *shape), uint8 or float32.
        y: labels, int64 of shape (N,).
        clients: the client of every row; None where there are no clients.
        splits: ``train`` or ``test`` for every row; None where there are no splits.
        integers: whether the inputs are lists of integers that are no pixels.
        num_labels: how many different labels there are.
        unused: columns of numbers that are left out, where the inputs, numbers too, were found by their names.
    """

    x: np.ndarray
    y: np.ndarray
    clients: np.ndarray | None
    splits: np.ndarray | None
    integers: bool
    num_labels: int
    unused: tuple[str, ...] = ()


def read_rows(paths: Sequence[Path], wanted: Wanted, shape: tuple[int, ...] | None, renumbered: bool = False) -> Rows:
    """All rows of some Parquet files with the same columns, in the order of the files.

    Args:
        paths: the files.
        wanted: their columns.
        shape: shape of an input; None takes encoded images and lists as they are.
        renumbered: whether the labels, any integers, are numbered from 0 by their rank.

    Raises:
        DataError: naming file, column and, counted from 0, row.
    """
    tables, layouts, unused = [], [], dict[str, None]()
    for path in paths:
        file = _open(path)
        layouts.append(_layout(path, file.schema_arrow, wanted))
        if layouts[-1] != layouts[0]:
            raise DataError(f"{path}: the columns are not those of {paths[0]} ({layouts[-1]}, {layouts[0]})")
        tables.append(_table(path, file, layouts[0]))
        unused |= dict.fromkeys(_unused(file.schema_arrow, layouts[0]) if wanted.x == AUTO else ())
    if not any(table.num_rows for table in tables):
        raise DataError(f"{', '.join(map(str, paths))}: no rows")
    filled = [(path, table) for path, table in zip(paths, tables, strict=True) if table.num_rows]
    inputs = read_inputs(filled, layouts[0], shape)
    y = np.concatenate([_labels(path, table, layouts[0].y, renumbered) for path, table in filled])
    present, numbers = np.unique(y, return_inverse=True)
    return Rows(
        inputs,
        numbers.astype(np.int64) if renumbered else y,
        _names(filled, layouts[0].client),
        _splits(filled, layouts[0].split),
        layouts[0].kind == "lists" and _of_integers(filled[0][1].schema.field(layouts[0].x[0]).type),
        len(present),
        tuple(unused),
    )


def _open(path: Path) -> pq.ParquetFile:
    if not path.is_file():
        raise DataError(f"dataset.path: {path} does not exist")
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"dataset.path: {path} is not a readable Parquet file: {str(error).strip()}") from error


def _layout(path: Path, schema: pa.Schema, wanted: Wanted) -> Layout:
    y = _column(path, schema, "y", wanted.y, _LABELS)
    if y is None:
        raise DataError(f"{path} has no column y or label, only {', '.join(schema.names)}; name it with dataset.y")
    client = None if wanted.client == NONE else _column(path, schema, "client", wanted.client, ("client",))
    split = None if wanted.split == NONE else _column(path, schema, "split", wanted.split, ("split",))
    if wanted.x != AUTO:
        given = (wanted.x,) if isinstance(wanted.x, str) else wanted.x
        return _named_inputs(path, schema, given, y, client, split)
    x = _column(path, schema, "x", AUTO, _INPUTS)
    others = [field for field in schema if _PREFIX.fullmatch(field.name) and field.name not in (x, y, client, split)]
    if x is not None:
        kind = _kind(path, schema.field(x))
        rivals = [f.name for f in others if kind == "numbers" or (f.name[-1].isdigit() and _is_number(f.type))]
        if rivals:
            of_what = "single numbers" if kind == "numbers" else "inputs"
            raise DataError(
                f"{path} has a column {x!r} of {of_what} and also {', '.join(rivals)}; name the inputs with dataset.x"
            )
        return Layout((x,), kind, y, client, split)
    if not any(_is_number(field.type) for field in others):
        raise DataError(
            f"{path} has no column x or image, nor numeric columns whose names begin with x, only "
            f"{', '.join(schema.names)}; name the inputs with dataset.x"
        )
    for field in others:
        _check_number(path, field, others)
    return Layout(tuple(_in_order([field.name for field in others])), "numbers", y, client, split)


def _column(path: Path, schema: pa.Schema, field: str, name: str, candidates: Sequence[str]) -> str | None:
    """The column that a field names, or the one among the candidates that there is.

    Raises:
        DataError: there is no such column, or several candidates.
    """
    if name != AUTO:
        if name not in schema.names:
            raise DataError(f"dataset.{field}: {path} has no column {name!r}, only {', '.join(schema.names)}")
        return name
    found = [candidate for candidate in candidates if candidate in schema.names]
    if len(found) > 1:
        raise DataError(f"{path} has columns {' and '.join(found)}; say which is meant with dataset.{field}")
    return found[0] if found else None


def _named_inputs(
    path: Path, schema: pa.Schema, names: Sequence[str], y: str, client: str | None, split: str | None
) -> Layout:
    fields = [schema.field(str(_column(path, schema, "x", name, ()))) for name in names]
    if len(fields) == 1:
        return Layout((fields[0].name,), _kind(path, fields[0]), y, client, split)
    for field in fields:
        _check_number(path, field, fields)
    return Layout(tuple(names), "numbers", y, client, split)


def _check_number(path: Path, field: pa.Field, inputs: Sequence[pa.Field]) -> None:
    """Refuses a column among several inputs that is none of numbers: without it, models would see something else."""
    if not _is_number(field.type):
        names = [other.name for other in inputs if other is not field]
        raise DataError(
            f"{path}: column {field.name!r} has the type {field.type}, but the inputs beside it "
            f"({', '.join(names)}) are numbers: convert it, or name the inputs with dataset.x=[NAME, NAME, ...]"
        )


def _unused(schema: pa.Schema, layout: Layout) -> list[str]:
    """Columns of numbers beside inputs that are columns of numbers."""
    used = (*layout.x, layout.y, layout.client, layout.split)
    return [f.name for f in schema if layout.kind == "numbers" and _is_number(f.type) and f.name not in used]


def _in_order(names: list[str]) -> list[str]:
    """By number where all names end in one (x2 before x10), else as the file has them."""
    ends = [re.search(r"\d+$", name) for name in names]
    if all(ends):
        return sorted(names, key=lambda name: int(re.search(r"\d+$", name).group()))  # type: ignore[union-attr]
    return names


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _kind(path: Path, field: pa.Field) -> Literal["numbers", "lists", "bytes", "files"]:
    kind = field.type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return "files"  # as the `datasets` library stores images
    if pa.types.is_fixed_size_binary(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "bytes"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        if _is_number(kind.value_type):
            return "lists"
    if _is_number(kind):
        return "numbers"
    raise DataError(
        f"{path}: the column {field.name!r} has the type {kind}; inputs are lists of numbers, raw pixels or "
        "encoded images (binary), or one number"
    )


def _table(path: Path, file: pq.ParquetFile, layout: Layout) -> pa.Table:
    names = [*layout.x, layout.y, *(name for name in (layout.client, layout.split) if name is not None)]
    try:
        return file.read(columns=names)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {str(error).strip()}") from error


def _of_integers(kind: pa.DataType) -> bool:
    """Returns whether lists are of integers other than uint8, which are pixels."""
    return bool(pa.types.is_integer(kind.value_type) and kind.value_type != pa.uint8())


def _labels(path: Path, table: pa.Table, name: str, any_integers: bool) -> np.ndarray:
    column = table.column(name)
    if not pa.types.is_integer(column.type):
        raise DataError(f"{path}: column {name!r} has the type {column.type}; labels are integers from 0")
    refuse_nulls(path, column, name)
    labels: np.ndarray = column.to_numpy().astype(np.int64)
    if labels.min() < 0 and not any_integers:
        row = int(np.argmax(labels < 0))
        raise DataError(
            f"{path}: column {name!r}, row {row} is {labels[row]}; labels are integers from 0, or any with "
            "dataset.labels=renumbered"
        )
    return labels


def _text(path: Path, table: pa.Table, name: str) -> np.ndarray | None:
    """A column of names; None if all are null."""
    column = table.column(name)
    if column.null_count == len(column):
        return None
    refuse_nulls(path, column, name)
    try:
        return np.array(column.cast(pa.string()).to_pylist(), dtype=object)
    except pa.ArrowException as error:
        raise DataError(f"{path}: column {name!r} has the type {column.type}; it must hold text or integers") from error


def _names(filled: Sequence[tuple[Path, pa.Table]], name: str | None) -> np.ndarray | None:
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


def _splits(filled: Sequence[tuple[Path, pa.Table]], name: str | None) -> np.ndarray | None:
    splits = _names(filled, name)
    if splits is None:
        return None
    start = 0
    for path, table in filled:
        for row, split in enumerate(splits[start : start + table.num_rows]):
            if split not in ("train", "test"):
                raise DataError(f"{path}: column {name!r}, row {row} is {split!r}; it must be train or test")
        start += table.num_rows
    return splits
