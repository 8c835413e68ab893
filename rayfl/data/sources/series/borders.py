"""Where the splits of series begin: after counts of times, or at times."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator

from rayfl.errors import DataError


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, datetime.date) else value  # YAML has dates


Border = Annotated[int | str, BeforeValidator(_as_text)]
"""A count of times from a client's first one on, or a time as text."""


def check_borders(borders: Sequence[int | str]) -> None:
    """Raises ValueError for borders that divide no series.

    Args:
        borders: where validation times begin, where test times begin, and perhaps where what follows is left out.
    """
    if len(borders) not in (2, 3):
        raise ValueError(
            f"borders has {len(borders)} entries: give where validation times begin, where test times begin, and "
            "perhaps where these end"
        )
    counts = [one for one in borders if isinstance(one, int)]
    texts = [one for one in borders if isinstance(one, str)]
    if counts and texts:
        raise ValueError("borders are counts of times, or times as texts, and not some of both")
    if counts and counts[0] < 1:
        raise ValueError(f"borders: {counts[0]} times leave none for training: raise it")
    points = np.array(counts) if counts else _numbers(texts)
    if points is None:
        points = _dates(texts)
    if points[0] > points[1] or (points[1:-1] >= points[2:]).any():
        raise ValueError(f"borders {list(borders)} do not ascend; the first two may be equal, for no validation times")


def places_of(borders: Sequence[int | str], times: np.ndarray, where: str) -> list[int]:
    """Returns the places of the first times at or after borders.

    Args:
        borders: that were checked.
        times: of a client, ascending; numbers or ``datetime64``.
        where: names the client in messages.

    Raises:
        DataError: times are numbers, and borders are not, or the other way round.
    """
    counts = [one for one in borders if isinstance(one, int)]
    if counts:
        return counts
    texts = list(map(str, borders))
    try:
        points = _dates(texts) if times.dtype.kind == "M" else _numbers(texts)
    except ValueError as error:
        raise DataError(f"dataset.borders: {error}, as the times of {where} are") from error
    if points is None:
        raise DataError(f"dataset.borders: {texts} are no numbers, but the times of {where} are: give such numbers")
    return [int(place) for place in np.searchsorted(times, points)]


def _numbers(texts: Sequence[str]) -> np.ndarray | None:
    try:
        return np.array(list(map(float, texts)))
    except ValueError:
        return None


def _dates(texts: Sequence[str]) -> np.ndarray:
    found = []
    for text in texts:
        try:
            time = datetime.datetime.fromisoformat(text)
        except ValueError as error:
            raise ValueError(f"{text!r} is no time like '2016-07-01 00:00'") from error
        found.append(time if time.tzinfo is None else time.astimezone(datetime.UTC).replace(tzinfo=None))
    return np.array(found, dtype="datetime64[us]")
