"""A user's own files as arrays: which columns there are, and every way in which their values may be wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from rayfl.data.sources.column_inputs import Layout, read_inputs, refuse_nulls
from rayfl.data.sources.column_tables import Missing, is_category, read_table
from rayfl.data.sources.column_targets import read_targets, target_columns
from rayfl.data.sources.column_texts import PADDING, read_texts
from rayfl.data.sources.table_files import TableFile
from rayfl.data.tables import TableColumns
from rayfl.errors import DataError
from rayfl.examples import InputSpec, Target
from rayfl.metrics.language import IGNORED

AUTO, NONE = "auto", "none"
_INPUTS = ("x", "image", "img")
_PREFIX = re.compile(r"x[\W_]?\w+")


@dataclass(frozen=True)
class Wanted:
    """Which columns are meant; ``auto`` finds them by name, ``none`` (clients and splits only) leaves them out.

    Attributes:
        client: the column with the client's name.
        split: the column with ``train`` or ``test``.
        x: the column with the inputs, or several with a number each.
        y: the column with the labels, or several.
        target: what is learned of the rows.
        tokens: whether the inputs are lists of tokens.
        tokenizer: of texts; see :mod:`rayfl.data.sources.column_texts`.
        length: tokens of a text.
        vocabulary: number of tokens.
        missing: what becomes of missing numbers.
        named: whether the columns are a table's, whatever their types.
    """

    client: str = AUTO
    split: str = AUTO
    x: str | tuple[str, ...] = AUTO
    y: str | tuple[str, ...] = AUTO
    target: Target = "class"
    tokens: bool = False
    tokenizer: str | None = None
    length: int | None = None
    vocabulary: int | None = None
    missing: Missing = "error"
    named: bool = False

    @property
    def of_texts(self) -> bool:
        """Whether the inputs are texts or tokens."""
        return self.tokens or self.tokenizer is not None


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
        vocabulary: number of tokens; 0 without.
        cut: how many texts were longer than they may be.
        table: what the columns of a table are; None of other inputs.
    """

    x: np.ndarray
    y: np.ndarray
    clients: np.ndarray | None
    splits: np.ndarray | None
    integers: bool
    num_labels: int
    vocabulary: int = 0
    cut: int = 0
    table: TableColumns | None = None

    def spec(self, num_classes: int, target: Target) -> InputSpec:
        """What a model must know of them.

        Args:
            num_classes: of classes.
            target: what is learned.
        """
        outputs = {"class": num_classes, "tokens": self.vocabulary}.get(target) or int(self.y.shape[-1])
        return InputSpec("tokens" if self.vocabulary else "image", self.x.shape[1:], outputs, self.vocabulary, target)


def read_rows(paths: Sequence[Path], wanted: Wanted, shape: tuple[int, ...] | None, renumbered: bool = False) -> Rows:
    """All rows of some files with the same columns, in the order of the files.

    Args:
        paths: the files.
        wanted: their columns.
        shape: shape of an input; None takes encoded images and lists as they are.
        renumbered: whether the labels, any integers, are numbered from 0 by their rank.

    Raises:
        DataError: naming file, column and, counted from 0, row.
    """
    tables, layouts = [], []
    for path in paths:
        file = TableFile(path)
        layouts.append(_layout(path, file.schema, wanted))
        if layouts[-1] != layouts[0]:
            raise DataError(f"{path}: the columns are not those of {paths[0]} ({layouts[-1]}, {layouts[0]})")
        tables.append(file.read(layouts[0].names))
    if not any(table.num_rows for table in tables):
        raise DataError(f"{', '.join(map(str, paths))}: no rows")
    layout = layouts[0]
    filled = [(path, table) for path, table in zip(paths, tables, strict=True) if table.num_rows]
    clients, splits = _names(filled, layout.client), _splits(filled, layout.split)
    if layout.kind in ("texts", "tokens"):
        return _of_texts(filled, layout, wanted, clients, splits)
    columns = None
    if layout.kind == "table":
        x, columns = read_table(filled, layout.x, layout.client, wanted.missing)
    else:
        x = read_inputs(filled, layout, shape)
    y, count = _targets(filled, layout, wanted, renumbered)
    integers = layout.kind == "lists" and _of_integers(filled[0][1].schema.field(layout.x[0]).type)
    return Rows(x, y, clients, splits, integers, count, table=columns)


def _targets(
    filled: Sequence[tuple[Path, pa.Table]], layout: Layout, wanted: Wanted, renumbered: bool
) -> tuple[np.ndarray, int]:
    """What is learned, and how many different labels there are, where they are classes."""
    parts = [read_targets(path, table, layout.y, wanted.target, layout.client, renumbered) for path, table in filled]
    y = np.concatenate(parts)
    if wanted.target != "class":
        return y, 0
    present, numbers = np.unique(y, return_inverse=True)
    return numbers.astype(np.int64) if renumbered else y, len(present)


def _of_texts(
    filled: Sequence[tuple[Path, pa.Table]],
    layout: Layout,
    wanted: Wanted,
    clients: np.ndarray | None,
    splits: np.ndarray | None,
) -> Rows:
    count = sum(table.num_rows for _, table in filled)
    training = np.ones(count, dtype=bool) if splits is None else splits == "train"
    following = wanted.target == "tokens"
    length = wanted.length + 1 if following and wanted.length is not None else wanted.length
    tokenizer = None if layout.kind == "tokens" else wanted.tokenizer
    x, vocabulary, cut = read_texts(filled, layout.x[0], layout.client, training, tokenizer, length, wanted.vocabulary)
    if following:
        if x.shape[1] < 2:
            raise DataError(f"{filled[0][0]}: column {layout.x[0]!r} has no text of two tokens: none has a next one")
        y = np.where(x[:, 1:] == PADDING, IGNORED, x[:, 1:])
        return Rows(x[:, :-1], y, clients, splits, False, 0, vocabulary, cut)
    y, labels = _targets(filled, layout, wanted, renumbered=False)
    return Rows(x, y, clients, splits, False, labels, vocabulary, cut)


def _layout(path: Path, schema: pa.Schema, wanted: Wanted) -> Layout:
    y = target_columns(path, schema, wanted.y, wanted.target)
    client = None if wanted.client == NONE else _column(path, schema, "client", wanted.client, ("client",))
    split = None if wanted.split == NONE else _column(path, schema, "split", wanted.split, ("split",))
    if wanted.x != AUTO:
        given = (wanted.x,) if isinstance(wanted.x, str) else wanted.x
        return _named_inputs(path, schema, given, Layout((), "table", y, client, split), wanted)
    if wanted.of_texts:
        return _texts(path, schema, _text_column(path, schema), Layout((), "texts", y, client, split), wanted)
    x = _column(path, schema, "x", AUTO, _INPUTS)
    taken = {x, *y, client, split}
    others = [field for field in schema if _PREFIX.fullmatch(field.name) and field.name not in taken]
    if x is not None:
        kind = _kind(path, schema.field(x))
        if kind == "numbers" and others:
            names = ", ".join(field.name for field in others)
            raise DataError(
                f"{path} has a column {x!r} of single numbers and also {names}; name the inputs with dataset.x"
            )
        return Layout((x,), kind, y, client, split)
    if not any(_is_number(field.type) for field in others):
        raise DataError(
            f"{path} has no column x or image, nor numeric columns whose names begin with x, only "
            f"{', '.join(schema.names)}; name the inputs with dataset.x"
        )
    if wanted.named:
        return Layout(tuple(_in_order([field.name for field in others])), "table", y, client, split)
    for field in others:
        _check_number(path, field, others)
    return Layout(tuple(_in_order([field.name for field in others])), "numbers", y, client, split)


def _text_column(path: Path, schema: pa.Schema) -> str:
    found = [name for name in ("text", "x") if name in schema.names]
    if not found:
        raise DataError(
            f"{path} has no column text or x, only {', '.join(schema.names)}; name the texts with dataset.x"
        )
    return found[0]


def _texts(path: Path, schema: pa.Schema, name: str, layout: Layout, wanted: Wanted) -> Layout:
    """The layout of texts, or of lists of tokens."""
    kind = schema.field(name).type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if wanted.tokens:
        if not (lists and pa.types.is_integer(kind.value_type)):
            raise DataError(f"{path}: column {name!r} has the type {kind}; tokens are lists of integers")
        return replace(layout, x=(name,), kind="tokens")
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(f"{path}: column {name!r} has the type {kind}, but dataset.tokenizer is for text")
    return replace(layout, x=(name,), kind="texts")


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


def _named_inputs(path: Path, schema: pa.Schema, names: Sequence[str], layout: Layout, wanted: Wanted) -> Layout:
    fields = [schema.field(str(_column(path, schema, "x", name, ()))) for name in names]
    if both := [name for name in names if name in layout.y]:
        raise DataError(f"dataset.x: column {both[0]!r} of {path} is to be learned (dataset.y): name it only once")
    if wanted.of_texts:
        if len(fields) > 1:
            raise DataError(f"dataset.x names {len(fields)} columns, but a text is one; of {path}, name one")
        return _texts(path, schema, names[0], layout, wanted)
    if len(fields) == 1 and not wanted.named and not is_category(fields[0].type):
        return replace(layout, x=(fields[0].name,), kind=_kind(path, fields[0]))
    if len(fields) == 1 and pa.types.is_string(fields[0].type) and not wanted.named:
        raise DataError(
            f"{path}: column {names[0]!r} is text: set dataset.tokenizer=words or characters to read it as text, or "
            "dataset.standardize or dataset.missing to take it for a category"
        )
    if wanted.named or any(is_category(field.type) for field in fields):
        for field in fields:
            if not is_category(field.type):
                _check_number(path, field, fields)
        return replace(layout, x=tuple(names), kind="table")
    for field in fields:
        _check_number(path, field, fields)
    return replace(layout, x=tuple(names), kind="numbers")


def _check_number(path: Path, field: pa.Field, inputs: Sequence[pa.Field]) -> None:
    """Refuses a column among several inputs that is none of numbers: without it, models would see something else."""
    if not _is_number(field.type):
        names = [other.name for other in inputs if other is not field]
        raise DataError(
            f"{path}: column {field.name!r} has the type {field.type}, but the inputs beside it "
            f"({', '.join(names)}) are numbers: convert it, or name the inputs with dataset.x=[NAME, NAME, ...]"
        )


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
    text = "; for texts set dataset.tokenizer" if pa.types.is_string(kind) else ""
    raise DataError(
        f"{path}: the column {field.name!r} has the type {kind}; inputs are lists of numbers, raw pixels or "
        f"encoded images (binary), or one number{text}"
    )


def _of_integers(kind: pa.DataType) -> bool:
    """Whether lists are of integers other than uint8, which are pixels."""
    return bool(pa.types.is_integer(kind.value_type) and kind.value_type != pa.uint8())


def _text(path: Path, table: pa.Table, name: str) -> np.ndarray | None:
    """A column of names; None if all are null."""
    column = table.column(name)
    if column.null_count == len(column):
        return None
    refuse_nulls(path, table, name)
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
