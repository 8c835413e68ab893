"""Columns of a file of series: times, numbers and clients' names, and where something else stands."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfl.data.sources.columns.files import Dialect, TableFile, no_column
from rayfl.errors import DataError

_TIMES = (pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC"))
"""What texts may be that are times without a format of the user's, in the order in which they are tried."""


class SeriesFile:
    """An open file of series.

    Args:
        path: the file.
        named: columns that are read, with the options that name them.
        every: whether all others are read, too.
        texts: columns that are texts, whatever they look like.
        dialect: how CSV files are written.

    Attributes:
        path: the file.
        columns: names of the columns that were read.

    Raises:
        DataError: it cannot be read, has no rows, or lacks a column.
    """

    def __init__(
        self, path: Path, named: Sequence[tuple[str, str]], every: bool, texts: Sequence[str], dialect: Dialect
    ) -> None:
        self.path, self._decimal = path, dialect.decimal
        self._file = TableFile(path, None, texts, dialect)
        known = self._file.schema.names
        for option, name in named:
            if name not in known:
                raise no_column(option, path, name, self._file.schema, self._file.other_separator)
        self._table = self._file.read(known if every else [name for _, name in named])
        self.columns: list[str] = self._table.column_names
        if not self._table.num_rows:
            raise DataError(f"{path}: no rows")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def names(self, name: str) -> np.ndarray:
        """Returns a column as texts, object array of shape (n,).

        Raises:
            DataError: naming the line without a value.
        """
        return np.array(self._whole(name).cast(pa.string()).to_pylist(), dtype=object)

    def times(self, name: str, format: str | None) -> np.ndarray:
        """Returns a column as numbers or ``datetime64``, shape (n,); times with a zone are those of UTC.

        Args:
            name: of the column.
            format: of texts, as ``strptime`` of Python reads it; None: numbers, or times as in ISO 8601.

        Raises:
            DataError: naming the line that has no time.
        """
        column = self._whole(name)
        if format is not None:
            return self._of_format(name, column, format)
        if pa.types.is_string(column.type):
            column = self._parsed(name, column)
        if pa.types.is_date(column.type):
            column = column.cast(pa.timestamp("ms"))
        kind = column.type
        if not (pa.types.is_timestamp(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise DataError(f"{self.path}: column {name!r} has the type {kind}; needed are times, or numbers")
        values: np.ndarray = column.to_numpy()
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            row = int(np.flatnonzero(~np.isfinite(values))[0])
            raise DataError(f"{self._at(name, row)}: the time is not finite; mend it, or remove the row")
        return values

    def numbers(self, name: str) -> np.ndarray:
        """Returns a column as float64, shape (n,); nan where there is no value.

        Raises:
            DataError: naming the line that has no number.
        """
        column = self._table.column(name)
        kind = column.type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
            raise self._no_number(name, column)
        values: np.ndarray = column.cast(pa.float64(), safe=False).to_numpy()
        if np.isinf(values).any():
            row = int(np.flatnonzero(np.isinf(values))[0])
            raise DataError(f"{self._at(name, row)}: the value is not finite; mend it, or remove the row")
        return values

    def _at(self, name: str, row: int) -> str:
        return f"{self.path}, column {name!r}, {self._file.place(row)}"

    def _whole(self, name: str) -> pa.ChunkedArray:
        column = self._table.column(name)
        if column.null_count:
            row = pc.index(pc.is_null(column), True).as_py()
            raise DataError(f"{self._at(name, row)}: no value; fill it in, or remove the row")
        return column

    def _of_format(self, name: str, column: pa.ChunkedArray, format: str) -> np.ndarray:
        if not pa.types.is_string(column.type):
            raise DataError(
                f"{self.path}: dataset.time_format is for times that are texts, and column {name!r} has the type "
                f"{column.type}: leave it out"
            )
        known, places = np.unique(np.array(column.to_pylist(), dtype=object).astype(str), return_inverse=True)
        found = np.empty(len(known), dtype="datetime64[us]")
        for place, text in enumerate(known.tolist()):
            try:
                time = datetime.datetime.strptime(text, format)
            except ValueError as error:
                row = int(np.flatnonzero(places == place)[0])
                raise DataError(
                    f"{self._at(name, row)}: {text!r} is no time of the form dataset.time_format={format!r}"
                ) from error
            found[place] = time if time.tzinfo is None else time.astimezone(datetime.UTC).replace(tzinfo=None)
        return found[places]

    def _parsed(self, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Texts as times, which a file's own reader may have left texts."""
        for kind in _TIMES:
            if _castable(column, kind):
                return column.cast(kind)
        # Which kind was meant is told by the first one: where that is none, by no other.
        meant = next((kind for kind in _TIMES if _castable(column.slice(0, 1), kind)), _TIMES[1])
        row = _first_unlike(column, meant)
        raise DataError(
            f"{self._at(name, row)}: {column[row].as_py()!r} is no time like 2016-07-01 00:00:00, and not all are "
            "numbers: mend it, or say of what form times are with dataset.time_format, such as '%d.%m.%Y %H:%M'"
        )

    def _no_number(self, name: str, column: pa.ChunkedArray) -> DataError:
        if not pa.types.is_string(column.type):
            return DataError(f"{self.path}: column {name!r} has the type {column.type}; needed are numbers")
        texts: list[Any] = column.to_pylist()
        wrong = (row for row, text in enumerate(texts) if text is not None and not _is_number(text, self._decimal))
        row = next(wrong, 0)
        other = "," if self._decimal == "." else "."
        fix = "mend it, or remove the row"
        if self._file.kind == "CSV" and texts[row] is not None and _is_number(texts[row], other):
            fix = f"set dataset.decimal='{other}' if that is the decimal sign"
        return DataError(f"{self._at(name, row)}: {texts[row]!r} is no number; {fix}")


def _is_number(text: str, decimal: str) -> bool:
    other = "," if decimal == "." else "."
    try:
        float("" if other in text else text.replace(decimal, "."))
    except ValueError:
        return False
    return True


def _castable(column: pa.ChunkedArray, kind: pa.DataType) -> bool:
    try:
        column.cast(kind)
    except pa.ArrowException:
        return False
    return True


def _first_unlike(column: pa.ChunkedArray, kind: pa.DataType) -> int:
    """Returns the first row, one of which there is, that cannot be cast."""
    fine, wrong = 0, len(column)
    while wrong - fine > 1:  # the first ``fine`` rows can be cast, and not the first ``wrong``
        middle = (fine + wrong) // 2
        fine, wrong = (middle, wrong) if _castable(column.slice(0, middle), kind) else (fine, middle)
    return fine
