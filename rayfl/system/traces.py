"""Traces of real devices, in the columns of FedScale's files (Lai et al., ICML 2022).

FedScale's own files are Python objects, which run code when they are opened; rayfl reads the same content as Parquet,
JSON or CSV. JSON may be FedScale's own form, a mapping from ids to records, or a list of records.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from rayfl.errors import DataError
from rayfl.naming.plain_json import read_json

NEVER_US = 1 << 62
"""Later than any time of the virtual clock, in microseconds."""


@dataclass(frozen=True)
class Hours:
    """When a device is available, in seconds; begins again after ``period``. The clock's microseconds are rounded.

    Attributes:
        active: when it becomes available, ascending.
        inactive: when it ends, one for each.
        period: length of the trace.
    """

    active: tuple[float, ...]
    inactive: tuple[float, ...]
    period: float

    def ends_us(self, now_us: int) -> int | None:
        """Until when a device that is available now stays so, in microseconds; None if it is not available."""
        active, inactive, period = self.rounded_us
        start, now = now_us - now_us % period, now_us % period
        place = bisect_right(active, now) - 1
        if place < 0 or now >= inactive[place]:
            return None
        end = inactive[place]
        if end == period and active[0] == 0:
            if inactive[0] == period:
                return NEVER_US
            end += inactive[0]
        return start + end

    def begins_us(self, now_us: int) -> int:
        """Returns when a device that is not available now becomes so, in microseconds; later than now."""
        active, _, period = self.rounded_us
        start, place = now_us - now_us % period, bisect_right(active, now_us % period)
        return start + (active[place] if place < len(active) else period + active[0])

    @cached_property
    def rounded_us(self) -> tuple[list[int], list[int], int]:
        """The attributes in whole microseconds: what is compared with the clock must be what is added to it."""
        active, inactive = ([round(time * 1e6) for time in times] for times in (self.active, self.inactive))
        return active, inactive, round(self.period * 1e6)


def read_devices(path: str) -> list[tuple[float, float]]:
    """Milliseconds per sample and kilobit per second of each device in a file.

    Raises:
        DataError: naming the file, the row and what is wrong.
    """
    devices = []
    for row, record in enumerate(_records(path, ("computation", "communication"))):
        computation, communication = (_number(path, row, record, name) for name in ("computation", "communication"))
        if computation < 0 or communication <= 0:
            raise DataError(f"{path}, device {row}: computation must not be negative, communication must be above 0")
        devices.append((computation, communication))
    return devices


def read_hours(path: str) -> list[Hours]:
    """Returns when each device of a file is available.

    Raises:
        DataError: naming the file, the row and what is wrong.
    """
    found = []
    for row, record in enumerate(_records(path, ("active", "inactive", "finish_time"))):
        active, inactive = (_seconds(path, row, record, name) for name in ("active", "inactive"))
        period = _number(path, row, record, "finish_time")
        if not active or len(active) != len(inactive):
            raise DataError(f"{path}, device {row}: active and inactive must be lists of the same length, at least 1")
        hours = Hours(tuple(active), tuple(inactive), period)
        if not _is_usable(hours):
            raise DataError(
                f"{path}, device {row}: active and inactive must alternate in time, between 0 and finish_time, and be "
                "a microsecond apart at least"
            )
        found.append(hours)
    return found


def _is_usable(hours: Hours) -> bool:
    try:
        active, inactive, period = hours.rounded_us
    except OverflowError:
        return False
    times = [time for pair in zip(active, inactive, strict=True) for time in pair]
    return all(before < after for before, after in itertools.pairwise(times)) and times[0] >= 0 and times[-1] <= period


def _records(path: str, columns: Sequence[str]) -> list[Mapping[str, Any]]:
    file = Path(path).expanduser()
    try:
        if file.suffix == ".parquet":
            records = _rows(pq.read_table(file))
        elif file.suffix == ".csv":
            records = _rows(pc.read_csv(file))
        elif file.suffix == ".json":
            content = read_json(file.read_text(encoding="utf-8"))
            records = list(content.values()) if isinstance(content, dict) else content
        else:
            raise DataError(f"{path}: a trace is a .parquet, .csv or .json file; docs/system.md converts FedScale's")
    except (OSError, pa.ArrowException, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not isinstance(records, list) or not records or not all(isinstance(record, dict) for record in records):
        raise DataError(f"{path} must have at least one record, each with the columns {', '.join(columns)}")
    missing = [name for name in columns if name not in records[0]]
    if missing:
        raise DataError(f"{path} has no column {missing[0]}; it needs {', '.join(columns)}")
    return records


def _rows(table: pa.Table) -> list[Mapping[str, Any]]:
    """The rows of a table; raises ValueError for two columns of a name, of which the last alone would count."""
    if twice := [name for name, times in Counter(table.schema.names).items() if times > 1]:
        raise ValueError(f"it has several columns called {twice[0]!r}: rename or remove one of them")
    return list(table.to_pylist())


def _number(path: str, row: int, record: Mapping[str, Any], name: str) -> float:
    value = record.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise DataError(f"{path}, device {row}: {name} must be a number, not {value!r}")
    return float(value)


def _seconds(path: str, row: int, record: Mapping[str, Any], name: str) -> list[float]:
    values = record.get(name)
    if not isinstance(values, list):
        raise DataError(f"{path}, device {row}: {name} must be a list of seconds, not {values!r}")
    return [_number(path, row, {name: value}, name) for value in values]
