"""Files of series: a row is a time, of one client (long) or of all (wide)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from rayfl.data.partitions.owners import places_by_owner
from rayfl.data.series import Series
from rayfl.data.sources.columns.files import Dialect
from rayfl.data.sources.series.borders import places_of
from rayfl.data.sources.series.calendar import Cycle, calendar_of
from rayfl.data.sources.series.columns import SeriesFile
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


@dataclass(frozen=True)
class Reading:
    """How files of series are read.

    Attributes:
        time: column of the times.
        covariates: columns that are no series to forecast.
        time_format: of times that are texts, as ``strptime`` of Python reads it; None: as in ISO 8601.
        dialect: how CSV files are written.
    """

    time: str
    covariates: tuple[str, ...] = ()
    time_format: str | None = None
    dialect: Dialect = field(default_factory=Dialect)

    def opened(self, path: Path, option: str, series: Sequence[str], client: str | None = None) -> SeriesFile:
        """Opens a file; errors as for :class:`SeriesFile`.

        Args:
            path: the file.
            option: that names the series.
            series: columns that are forecast; none: all others are read, too.
            client: column of the clients' names.
        """
        named = [] if client is None else [("client", client)]
        named += [("time", self.time), *((option, one) for one in series)]
        named += [("covariates", one) for one in self.covariates]
        texts = [one for one in (client, self.time if self.time_format is not None else None) if one is not None]
        return SeriesFile(path, named, not series, texts, self.dialect)

    def times(self, file: SeriesFile) -> np.ndarray:
        """See :meth:`SeriesFile.times`."""
        return file.times(self.time, self.time_format)


def read_long(files: Sequence[Path], client: str | None, targets: Sequence[str], reading: Reading) -> list[Measured]:
    """Reads files whose rows are a time of a client each.

    Args:
        files: with the same columns.
        client: column of the clients' names; None: each file is a client, called as it is without its ending.
        targets: columns of the series that are forecast.
        reading: the other columns.

    Returns:
        Clients in the order of their names as texts, rows in that of the files.

    Raises:
        DataError: naming file, column and line.
    """
    columns = (*targets, *reading.covariates)
    names, times, values = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for path in files:
        file = reading.opened(path, "targets", targets, client)
        names.append(np.full(len(file), path.stem, dtype=object) if client is None else file.names(client))
        times.append(reading.times(file))
        values.append(np.stack([file.numbers(one) for one in columns], 1))
    if client is None and len({path.stem for path in files}) < len(files):
        stems = [path.stem for path in files]
        twice = next(stem for place, stem in enumerate(stems) if stem in stems[:place])
        raise DataError(
            f"dataset.path: two files are called {twice!r} without their endings, and without dataset.client each file "
            "is a client: rename one, or name the clients' column"
        )
    _refuse_unlike(files, times)
    source = np.repeat(np.arange(len(files)), [len(one) for one in times])
    known, owner = np.unique(np.concatenate(names).astype(str), return_inverse=True)
    parts = places_by_owner(owner, len(known))
    all_times, all_values = np.concatenate(times), np.concatenate(values)
    return [
        Measured(str(name), all_times[part], all_values[part], columns, files[source[part[0]]])
        for name, part in zip(known, parts, strict=True)
    ]


def read_wide(files: Sequence[Path], clients: Sequence[str], reading: Reading) -> list[Measured]:
    """Reads files whose rows are a time of all clients each: a column is a client.

    Args:
        files: whose clients have different names.
        clients: columns that are clients; none: all but times and covariates.
        reading: the other columns; all clients of a file know its covariates.

    Returns:
        Clients in the order of files and columns.

    Raises:
        DataError: naming file, column and line.
    """
    found: list[Measured] = []
    for path in files:
        file = reading.opened(path, "targets", clients)
        own = list(clients) or [one for one in file.columns if one != reading.time and one not in reading.covariates]
        if not own:
            raise DataError(f"{path} has no column that is a client, only {', '.join(file.columns)}")
        times, shared = reading.times(file), [file.numbers(one) for one in reading.covariates]
        for name in own:
            values = np.stack([file.numbers(name), *shared], 1)
            found.append(Measured(name, times, values, (name, *reading.covariates), path))
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise DataError(f"dataset.path: client {twice!r} is a column of two files: rename one, or give one file")
    return found


def in_order(
    measured: Sequence[Measured],
    missing: Missing,
    gaps: Gaps,
    borders: Sequence[int | str] = (),
    calendar: Sequence[Cycle] = (),
) -> tuple[list[Series], list[str]]:
    """Sorts rows by time, and finds what is missing.

    Args:
        measured: clients.
        missing: what becomes of a row in which a value is missing: an error; the value of the time before; the row is
            left out.
        gaps: what becomes of times that are not as far apart as the median of those of the client: an error; windows
            do not cross the place; they cross it.
        borders: of the splits (:func:`check_borders`); none: they are divided by shares.
        calendar: cycles whose sine and cosine become series, the last ones.

    Returns:
        The clients' series, and what a user should be warned of.

    Raises:
        DataError: naming file, client, time and the fix.
    """
    series, filled, dropped, broken, unused, short = list[Series](), 0, 0, 0, 0, 0
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
        where = f"client {one.name!r}"
        values = np.concatenate([ordered.values, calendar_of(ordered.times, calendar, where)], 1)
        found = Series(one.name, values, places)
        if borders:
            divided = places_of(borders, ordered.times, where)
            found = found.divided(divided)
            unused += len(ordered.values) - len(found.values)
            short += len(ordered.values) < divided[-1]
        series.append(found)
    counted = (
        (filled, "missing values are filled in with those of the time before: {}"),
        (dropped, "rows with a missing value are left out: {}"),
        (unused, "times at or after the last of dataset.borders are left out: {}"),
        (short, "clients that have fewer times than the last of dataset.borders: {}"),
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


def _refuse_unlike(paths: Sequence[Path], times: Sequence[np.ndarray]) -> None:
    """Numbers of one file and times of another have no order."""
    for path, own in zip(paths, times, strict=True):
        if (own.dtype.kind == "M") != (times[0].dtype.kind == "M"):
            raise DataError(f"{path}: times here are numbers, but those of {paths[0]} are not, or the other way round")
