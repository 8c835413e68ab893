"""Files of interactions: a row says that a user chose an item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from rayfl.errors import DataError
from rayfl.naming.spelling import nearest

_SEPARATORS = {".csv": ",", ".tsv": "\t", ".data": "\t", ".dat": "::"}
_STANDS_IN = b"\x1f"
"""A byte between columns, for separators of several characters, which pyarrow does not read."""


@dataclass(frozen=True, eq=False)
class Interactions:
    """Rows of a file, in the order of time if there are times, else in that of the file.

    Attributes:
        users: the number of each row's user, int of shape (n,).
        items: the number of each row's item, int of shape (n,).
        rows: the number of each row in the file, counted from 0 below the header.
        user_names: by number, in the order of texts.
        item_names: by number, in the order of whole numbers, if all are some, else in that of texts.
        ratings: None, or numbers of shape (n,).
    """

    users: np.ndarray
    items: np.ndarray
    rows: np.ndarray
    user_names: np.ndarray
    item_names: np.ndarray
    ratings: np.ndarray | None = None

    def kept(self, which: np.ndarray) -> Interactions:
        """Returns some rows, by a mask or by their places; users and items are numbered as before."""
        ratings = None if self.ratings is None else self.ratings[which]
        return replace(self, users=self.users[which], items=self.items[which], rows=self.rows[which], ratings=ratings)

    def without_repeated(self, path: Path, first: bool) -> Interactions:
        """Returns rows of which no two have the same user and item.

        Args:
            path: of the file.
            first: whether the first of such rows is kept.

        Raises:
            DataError: there are such rows, and ``first`` is false.
        """
        pairs = self.users.astype(np.int64) * len(self.item_names) + self.items
        _, kept = np.unique(pairs, return_index=True)
        if len(kept) == len(pairs):
            return self
        if not first:
            row = np.setdiff1d(np.arange(len(pairs)), kept)[0]
            user, item = str(self.user_names[self.users[row]]), str(self.item_names[self.items[row]])
            raise DataError(
                f"{path}, row {self.rows[row]}: user {user!r} has item {item!r} a second time: remove such rows, or "
                "keep the first of them with dataset.repeated=first"
            )
        return self.kept(np.sort(kept))

    def renumbered(self) -> Interactions:
        """Returns the rows with numbers for those users and items alone that occur in them."""
        users, user = np.unique(self.users, return_inverse=True)
        items, item = np.unique(self.items, return_inverse=True)
        names = {"user_names": self.user_names[users], "item_names": self.item_names[items]}
        return replace(self, users=user, items=item, **names)


def read_interactions(
    path: Path, named: tuple[str, str, str | None, str | None], columns: Sequence[str], separator: str | None
) -> Interactions:
    """Reads a file.

    Args:
        path: the file.
        named: columns of users, items, times and ratings; None where they are not looked at.
        columns: names of the columns, for a text without a header.
        separator: between the columns of a text; None: by the file's name.

    Raises:
        DataError: naming the file, the column or the row.
    """
    if not path.is_file():
        raise DataError(f"dataset.path: {path} does not exist")
    user, item, time, rating = named
    wanted = [name for name in named if name is not None]
    table = _parquet(path) if path.suffix.lower() == ".parquet" else _text(path, columns, separator, [user, item])
    if missing := [name for name in wanted if name not in table.column_names]:
        known = ", ".join(table.column_names)
        hint = nearest(missing[0], table.column_names)
        raise DataError(
            f"{path} has no column {missing[0]!r}{hint}, only {known}: name the columns with dataset.user, "
            "dataset.item, dataset.time and dataset.rating, and those of a text without a header with dataset.columns"
        )
    if not table.num_rows:
        raise DataError(f"{path}: no rows")
    for name in wanted:
        if table.column(name).null_count:
            row = int(np.flatnonzero(table.column(name).is_null().to_numpy())[0])
            raise DataError(f"{path}, column {name!r}, row {row}: no value; fill it in, or remove the row")
    (user_names, users), (item_names, items) = _encoded(path, table, user), _encoded(path, table, item)
    order = _as_numbers(item_names)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    ratings = None if rating is None else _numbers(path, table, rating)
    found = Interactions(users, rank[items], np.arange(len(users)), user_names, item_names[order], ratings)
    return found if time is None else found.kept(np.argsort(_numbers(path, table, time), kind="stable"))


def _parquet(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"dataset.path: {path} is not a readable Parquet file: {str(error).strip()}") from error


def _text(path: Path, columns: Sequence[str], separator: str | None, names: Sequence[str]) -> pa.Table:
    separator = separator or _SEPARATORS.get(path.suffix.lower())
    if separator is None:
        known = ", ".join([".parquet", *_SEPARATORS])
        raise DataError(
            f"dataset.path: the name of {path} ends in none of {known}: say with dataset.separator what ends a column"
        )
    try:
        content, delimiter = path.read_bytes(), separator
        if len(separator) > 1:
            content, delimiter = content.replace(separator.encode(), _STANDS_IN), _STANDS_IN.decode()
        return pa.csv.read_csv(
            pa.BufferReader(content),
            read_options=pa.csv.ReadOptions(column_names=list(columns) or None),
            parse_options=pa.csv.ParseOptions(delimiter=delimiter),
            convert_options=pa.csv.ConvertOptions(
                column_types={name: pa.string() for name in names}, strings_can_be_null=True
            ),
        )
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"dataset.path: {path} is not a readable text with columns separated by {separator!r}: {str(error).strip()}"
        ) from error


def _encoded(path: Path, table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The names in a column in the order of texts, and which of them each row has."""
    column = table.column(name).combine_chunks()
    kind = column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_integer(kind)):
        raise DataError(f"{path}: column {name!r} has the type {kind}; names are texts or whole numbers")
    encoded = column.dictionary_encode()
    names, number = np.unique(np.array(encoded.dictionary.cast(pa.string()).to_pylist()), return_inverse=True)
    return names, number[encoded.indices.to_numpy()]


def _as_numbers(names: np.ndarray) -> np.ndarray:
    """The order of names as whole numbers; the order that they have, if some are none."""
    try:
        return np.argsort(names.astype(np.int64), kind="stable")
    except (ValueError, OverflowError):
        return np.arange(len(names))


def _numbers(path: Path, table: pa.Table, name: str) -> np.ndarray:
    """A column of finite numbers, or times as numbers; int64 or float64."""
    column = table.column(name)
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("ms"))
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise DataError(f"{path}: column {name!r} has the type {column.type}; needed are numbers, or times")
    values: np.ndarray = column.to_numpy()
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise DataError(f"{path}, column {name!r}, row {row}: the value is not finite; mend it, or remove the row")
    return values
