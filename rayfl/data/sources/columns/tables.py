"""Named columns of several kinds as vectors: numbers as they are, categories as columns of 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfl.data.sources.columns.files import owner
from rayfl.data.tables import TableColumns
from rayfl.errors import DataError

Missing = Literal["error", "mean", "indicator"]
_MOST_CATEGORIES = 1000
_MOST_GROUPS = 100
_ROUNDED = 0.01
"""Of a column's standard deviation: what float32 may round its numbers by without a warning."""


def is_category(kind: pa.DataType) -> bool:
    """Returns whether a column of this type holds categories: text, or true and false."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_dictionary(kind)
    )


def read_table(
    filled: Sequence[tuple[Path, pa.Table]], names: Sequence[str], client: str | None, missing: Missing
) -> tuple[np.ndarray, TableColumns]:
    """The inputs of some files, one after the other.

    A category becomes a column for each of its values, in the order of these; one that is missing has 0 in all.

    Args:
        filled: files and their tables, at least one row each.
        names: the inputs' columns.
        client: the clients' column, for messages.
        missing: what becomes of missing numbers: an error, or nan here and what :mod:`rayfl.data.tables` makes of it.

    Returns:
        float32 of shape (N, D), and what the columns are.

    Raises:
        DataError: naming file, column, row, client and the fix.
    """
    parts, titles, categories, gaps = list[np.ndarray](), list[str](), list[int](), list[int]()
    groups = list[int]()
    for name in names:
        _refuse_unlike(filled, name)
        if missing == "error":
            _refuse_missing(filled, name, client)
        if is_category(filled[0][1].column(name).type):
            found, values = _categories(filled, name)
            categories += range(len(titles), len(titles) + len(values))
            groups.append(len(values))
            titles += [f"{name}={value}" for value in values]
        else:
            found = np.concatenate([_numbers(path, table, name, client) for path, table in filled])[:, np.newaxis]
            if np.isnan(found).any():
                gaps.append(len(titles))
            titles.append(name)
        parts.append(found)
    return np.concatenate(parts, axis=1), TableColumns(tuple(titles), tuple(categories), tuple(gaps), tuple(groups))


def with_groups(
    x: np.ndarray, columns: TableColumns, groups: np.ndarray | None, name: str
) -> tuple[np.ndarray, TableColumns]:
    """Returns inputs with one more column, the position of each row's group of people, and what the columns then are.

    Args:
        x: float32 of shape (N, D).
        columns: what the D columns are.
        groups: the group of every row, texts; None where all are missing.
        name: of the column that says them, for messages.

    Raises:
        DataError: there are fewer than two groups, or very many.
    """
    known = np.empty(0, dtype=object) if groups is None else groups
    values = sorted(set(known), key=lambda text: (len(text) * text.isdigit(), text))  # 2 comes before 10
    if not 2 <= len(values) <= _MOST_GROUPS:
        found = "no value" if not values else "one value alone" if len(values) == 1 else f"{len(values):,} values"
        raise DataError(
            f"dataset.group: column {name!r} has {found}, and groups of people are 2 to {_MOST_GROUPS}: name a column "
            "with a value for each group, or leave the option out"
        )
    place = {value: number for number, value in enumerate(values)}
    numbers = np.array([place[value] for value in known])
    return np.concatenate([x, numbers[:, np.newaxis]], axis=1, dtype=np.float32), replace(columns, people=tuple(values))


def _refuse_unlike(filled: Sequence[tuple[Path, pa.Table]], name: str) -> None:
    """Numbers of one file would be categories of another one, or 1.50 and 1.5 two of them."""
    kinds = [_held(table.column(name).type) for _, table in filled]
    for (path, _), kind in zip(filled, kinds, strict=True):
        if kind != kinds[0]:
            raise DataError(
                f"{path}: column {name!r} holds {kind}, but that of {filled[0][0]} {kinds[0]}: store one kind in all "
                "files (in a CSV file, a single value that is no number makes a column text)"
            )


def _held(kind: pa.DataType) -> str:
    """Returns what a column of this type holds."""
    values = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_string(values) or pa.types.is_large_string(values):
        return "text"
    return str(kind) if is_category(kind) else "numbers"


def _refuse_missing(filled: Sequence[tuple[Path, pa.Table]], name: str, client: str | None) -> None:
    for path, table in filled:
        column = table.column(name)
        absent = pc.is_null(column, nan_is_null=pa.types.is_floating(column.type))
        if (row := pc.index(absent, True).as_py()) >= 0:
            raise DataError(
                f"{path}: column {name!r}, row {row}{owner(table, client, row)} is missing: fill it or remove the row, "
                "or set dataset.missing=mean or dataset.missing=indicator"
            )


def _numbers(path: Path, table: pa.Table, name: str, client: str | None) -> np.ndarray:
    """float32, nan where a number is missing."""
    with np.errstate(over="ignore"):  # what is too large is named below
        values: np.ndarray = table.column(name).cast(pa.float64(), safe=False).to_numpy().astype(np.float32)
    if np.isinf(values).any():
        row = int(np.argmax(np.isinf(values)))
        raise DataError(
            f"{path}: column {name!r}, row {row}{owner(table, client, row)} holds a value that is not finite in "
            "float32: remove the row, or mend it"
        )
    return values


def on_rounded(filled: Sequence[tuple[Path, pa.Table]], names: Sequence[str]) -> list[str]:
    """Names columns of numbers that differ by little more than float32 tells apart, such as times of one hour.

    Args:
        filled: files and their tables, whose numbers are finite in float32.
        names: columns.
    """
    found = []
    for name in names:
        columns = [table.column(name) for _, table in filled]
        if any(is_category(column.type) for column in columns):
            continue
        values = np.concatenate([column.cast(pa.float64(), safe=False).to_numpy() for column in columns])
        values = values[~np.isnan(values)]
        rounded, spread = np.abs(values - values.astype(np.float32)).max(initial=0), values.std() if len(values) else 0
        if rounded > _ROUNDED * spread > 0:
            found.append(
                f"column {name!r} has numbers up to {np.abs(values).max():.6g} of the standard deviation {spread:.3g}, "
                f"which float32 rounds by up to {rounded:.3g}: subtract a number from all of them, such as the smallest"
            )
    return found


def _categories(filled: Sequence[tuple[Path, pa.Table]], name: str) -> tuple[np.ndarray, list[str]]:
    columns = [table.column(name).cast(pa.string()) for _, table in filled]
    values = sorted({value for column in columns for value in column.unique().to_pylist() if value is not None})
    if len(values) > _MOST_CATEGORIES:
        raise DataError(
            f"{filled[0][0]}: column {name!r} is text with {len(values):,} different values, more than the "
            f"{_MOST_CATEGORIES:,} that categories may have: leave it out of dataset.x, or, for texts, name it alone "
            "and set dataset.tokenizer"
        )
    place = {value: number for number, value in enumerate(values)}
    codes = np.array([place.get(value, -1) for column in columns for value in column.to_pylist()])
    return (codes[:, np.newaxis] == np.arange(len(values))).astype(np.float32), values
