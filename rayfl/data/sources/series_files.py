"""Files of series: a row is a time, of one client (long) or of all (wide)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfl.data.series import Series
from rayfl.data.sources.table_files import TableFile, no_column
from rayfl.errors import DataError

Missing = Literal["error", "forward", "drop"]
Gaps = Literal["error", "split", "ignore"]
_ENDINGS = (".csv", ".tsv", ".parquet", ".json", ".jsonl")
_UNEVEN = 1e-6
"""Share of a step by which times may differ from it without a gap: decimal fractions are rounded."""


@dataclass(frozen=True, eq=False)
class Measured:
    """What one client measured, as the files have it.

    Attributes:
        name: the client's.
        times: numbers, or ``datetime64``, shape (n,).
        values: float64 of shape (n, series); nan where there is no value.
        columns: names of the series.
        where: the file, for messages.
    """

    name: str
    times: np.ndarray
    values: np.ndarray
    columns: tuple[str, ...]
    where: Path

    def told(self, row: int) -> str:
        """Names client and time of a row, for messages."""
        return f"{self.where}: client {self.name!r}, time {self.times[row]}"


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Returns files, with the tables of a folder in the place of that, sorted by name.

    Raises:
        DataError: a folder has none.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(one for one in path.iterdir() if one.suffix.lower() in _ENDINGS) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"dataset.path: the folder {path} has no file that ends in {', '.join(_ENDINGS)}")
        found += inside
    return found


def read_long(
    files: Sequence[Path], client: str | None, time: str, targets: Sequence[str], covariates: Sequence[str]
) -> list[Measured]:
    """Reads files whose rows are a time of a client each.

    Args:
        files: with the same columns.
        client: column of the clients' names; None: each file is a client, called as it is without its ending.
        time: column of the times.
        targets: columns of the series that are forecast.
        covariates: columns of the others.

    Returns:
        Clients in the order of their names as texts, rows in that of the files.

    Raises:
        DataError: naming file, column and row.
    """
    columns = (*targets, *covariates)
    options = [("targets", one) for one in targets] + [("covariates", one) for one in covariates]
    names, times, values, wheres = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), list[Path]()
    for path in files:
        table = _read(path, client, [("client", client), ("time", time), *options])
        if client is None:
            names.append(np.full(table.num_rows, path.stem, dtype=object))
        else:
            _refuse_null(path, table, client)
            names.append(np.array(table.column(client).cast(pa.string()).to_pylist(), dtype=object))
        times.append(_times(path, table, time))
        values.append(np.stack([_numbers(path, table, one) for one in columns], 1))
        wheres.append(path)
    if client is None and len({path.stem for path in files}) < len(files):
        stems = [path.stem for path in files]
        twice = next(stem for place, stem in enumerate(stems) if stem in stems[:place])
        raise DataError(
            f"dataset.path: two files are called {twice!r} without their endings, and without dataset.client each file "
            "is a client: rename one, or name the clients' column"
        )
    _refuse_unlike(wheres, times)
    file = np.repeat(np.arange(len(files)), [len(one) for one in times])
    known, owner = np.unique(np.concatenate(names).astype(str), return_inverse=True)
    order = np.argsort(owner, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(owner))[:-1])
    all_times, all_values = np.concatenate(times), np.concatenate(values)
    return [
        Measured(str(name), all_times[part], all_values[part], columns, wheres[file[part[0]]])
        for name, part in zip(known, parts, strict=True)
    ]


def read_wide(files: Sequence[Path], time: str, clients: Sequence[str], covariates: Sequence[str]) -> list[Measured]:
    """Reads files whose rows are a time of all clients each: a column is a client.

    Args:
        files: whose clients have different names.
        time: column of the times.
        clients: columns that are clients; none: all but times and covariates.
        covariates: columns of series that all clients of the file know.

    Returns:
        Clients in the order of files and columns.

    Raises:
        DataError: naming file, column and row.
    """
    found: list[Measured] = []
    for path in files:
        named = [("time", time), *(("targets", one) for one in clients), *(("covariates", one) for one in covariates)]
        table = _read(path, None, named, every=not clients)
        own = list(clients) or [one for one in table.column_names if one != time and one not in covariates]
        if not own:
            raise DataError(f"{path} has no column that is a client, only {', '.join(table.column_names)}")
        times, shared = _times(path, table, time), [_numbers(path, table, one) for one in covariates]
        for name in own:
            values = np.stack([_numbers(path, table, name), *shared], 1)
            found.append(Measured(name, times, values, (name, *covariates), path))
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise DataError(f"dataset.path: client {twice!r} is a column of two files: rename one, or give one file")
    return found


def in_order(measured: Sequence[Measured], missing: Missing, gaps: Gaps) -> tuple[list[Series], list[str]]:
    """Sorts rows by time, and finds what is missing.

    Args:
        measured: clients.
        missing: what becomes of a row in which a value is missing: an error; the value of the time before; the row is
            left out.
        gaps: what becomes of times that are not as far apart as the median of those of the client: an error; windows
            do not cross the place; they cross it.

    Returns:
        The clients' series, and what a user should be warned of.

    Raises:
        DataError: naming file, client, time and the fix.
    """
    series, filled, dropped, broken = list[Series](), 0, 0, 0
    for one in measured:
        order = np.argsort(one.times, kind="stable")
        ordered = Measured(one.name, one.times[order], one.values[order], one.columns, one.where)
        if (again := np.flatnonzero(ordered.times[1:] == ordered.times[:-1])).size:
            raise DataError(f"{ordered.told(again[0])}: there are two rows of this time; remove one of them")
        absent = np.isnan(ordered.values)
        if missing == "drop":
            kept = ~absent.any(1)
            dropped += int((~kept).sum())
            ordered = Measured(one.name, ordered.times[kept], ordered.values[kept], one.columns, one.where)
        elif absent.any():
            filled += int(absent.sum())
            ordered = _filled(ordered, absent, missing)
        places = () if gaps == "ignore" else tuple(_gaps(ordered))
        if places and gaps == "error":
            raise DataError(
                f"{ordered.told(places[0] - 1)}: the next time is {ordered.times[places[0]]}, but most are "
                f"{_step(ordered.times)} apart: fill in what is missing, or set dataset.gaps=split (windows do not "
                "cross gaps) or ignore (rows follow each other)"
            )
        broken += len(places)
        series.append(Series(one.name, ordered.values, places))
    counted = (
        (filled, "missing values are filled in with those of the time before: {}"),
        (dropped, "rows with a missing value are left out: {}"),
        (broken, "gaps between times, which windows do not cross: {}"),
    )
    return series, [words.format(count) for count, words in counted if count]


def _filled(one: Measured, absent: np.ndarray, missing: Missing) -> Measured:
    """Fills in what is missing with the last value before it."""
    rows = np.where(absent, -1, np.arange(len(absent))[:, None])
    last = np.maximum.accumulate(rows, axis=0)
    unknown = absent if missing == "error" else last < 0
    if unknown.any():
        row, column = (int(axis[0]) for axis in unknown.nonzero())
        fix = "there is none before it to fill in: remove the rows up to the first value, or set dataset.missing=drop"
        if missing == "error":
            fix = "fill it in, or set dataset.missing=forward (the last value before) or drop (without such times)"
        raise DataError(f"{one.told(row)}: column {one.columns[column]!r} has no value; {fix}")
    values = np.take_along_axis(one.values, last, 0)
    return Measured(one.name, one.times, values, one.columns, one.where)


def _step(times: np.ndarray) -> str:
    """The median difference, with its unit if it has one."""
    steps = np.sort(np.diff(times))
    return str(steps[len(steps) // 2])


def _gaps(one: Measured) -> Iterator[int]:
    """Yields the places of times that do not follow the one before by the median step."""
    if len(one.times) < 3:
        return
    steps = np.diff(one.times).astype(np.float64)
    median = np.median(steps)
    yield from (np.flatnonzero(np.abs(steps - median) > _UNEVEN * median) + 1).tolist()


def _read(path: Path, client: str | None, named: Sequence[tuple[str, str | None]], every: bool = False) -> pa.Table:
    """Some columns of a file, by the options that name them, or every one."""
    file = TableFile(path, client or "")  # no column has that name: those of a wide file are numbers
    for option, name in named:
        if name is not None and name not in file.schema.names:
            raise no_column(option, path, name, file.schema)
    table = file.read(file.schema.names if every else [name for _, name in named if name is not None])
    if not table.num_rows:
        raise DataError(f"{path}: no rows")
    return table


def _refuse_null(path: Path, table: pa.Table, name: str) -> None:
    if table.column(name).null_count:
        row = pc.index(pc.is_null(table.column(name)), True).as_py()
        raise DataError(f"{path}, column {name!r}, row {row}: no value; fill it in, or remove the row")


def _times(path: Path, table: pa.Table, name: str) -> np.ndarray:
    """Numbers or ``datetime64``."""
    _refuse_null(path, table, name)
    column = table.column(name)
    if pa.types.is_string(column.type):
        column = _parsed(path, column, name)
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("ms"))
    kind = column.type
    if not (pa.types.is_timestamp(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DataError(f"{path}: column {name!r} has the type {kind}; needed are times, or numbers")
    values: np.ndarray = column.to_numpy()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise DataError(f"{path}, column {name!r}, row {row}: the time is not finite; mend it, or remove the row")
    return values


def _parsed(path: Path, column: pa.ChunkedArray, name: str) -> pa.ChunkedArray:
    """Texts as times, which a file's own reader may have left texts."""
    for kind in (pa.float64(), pa.timestamp("us")):
        try:
            return column.cast(kind)
        except pa.ArrowException as error:
            why = error
    raise DataError(
        f"{path}: column {name!r} has texts that are no times like 2016-07-01 00:00:00, and not all numbers: {why}"
    )


def _refuse_unlike(paths: Sequence[Path], times: Sequence[np.ndarray]) -> None:
    """Numbers of one file and times of another have no order."""
    for path, own in zip(paths, times, strict=True):
        if (own.dtype.kind == "M") != (times[0].dtype.kind == "M"):
            raise DataError(f"{path}: times here are numbers, but those of {paths[0]} are not, or the other way round")


def _numbers(path: Path, table: pa.Table, name: str) -> np.ndarray:
    """float64, nan where there is no value."""
    column = table.column(name)
    kind = column.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        raise DataError(f"{path}: column {name!r} has the type {kind}; needed are numbers")
    values: np.ndarray = column.cast(pa.float64(), safe=False).to_numpy()
    if np.isinf(values).any():
        row = int(np.flatnonzero(np.isinf(values))[0])
        raise DataError(f"{path}, column {name!r}, row {row}: the value is not finite; mend it, or remove the row")
    return values
