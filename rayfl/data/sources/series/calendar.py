"""What a calendar says of times: hour, day of the week and month, as angles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rayfl.errors import DataError

Cycle = Literal["hour", "weekday", "month"]
"""``hour``: the time of day, to the second; ``weekday``: of the week, from Monday on; ``month``: of the year."""
_DAY, _WEEK, _YEAR = 86_400, 7, 12
_FIRST_MONDAY = 4
"""Days from 1970-01-01, a Thursday, to the first Monday."""


def calendar_of(times: np.ndarray, cycles: Sequence[Cycle], where: str) -> np.ndarray:
    """Returns sine and cosine of 2 pi times the share of each cycle that has passed, float64 of shape (n, 2 cycles).

    Args:
        times: ``datetime64`` of shape (n,).
        cycles: which ones.
        where: names the client in messages.

    Raises:
        DataError: times are numbers.
    """
    if not cycles:
        return np.empty((len(times), 0))
    if times.dtype.kind != "M":
        raise DataError(
            f"dataset.calendar: the times of {where} are numbers, which have no {cycles[0]}: leave it out, or give "
            "dates and times"
        )
    days = times.astype("datetime64[D]")
    shares = {
        "hour": (times - days).astype("timedelta64[s]").astype(np.float64) / _DAY,
        "weekday": (days.astype(np.int64) - _FIRST_MONDAY) % _WEEK / _WEEK,
        "month": times.astype("datetime64[M]").astype(np.int64) % _YEAR / _YEAR,
    }
    angles = [2 * np.pi * shares[cycle] for cycle in cycles]
    return np.stack([wave(angle) for angle in angles for wave in (np.sin, np.cos)], 1)
