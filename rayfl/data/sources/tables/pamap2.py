"""PAMAP2: what nine people do, told by sensors at wrist, chest and ankle; each person is a client."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.csv
from pydantic import Field

from rayfl.data.sources.columns.reading import Rows
from rayfl.data.sources.preparation.trees import FileTree
from rayfl.data.sources.remarks import Remark
from rayfl.data.sources.rows.archived import ArchivedSource
from rayfl.errors import DataError
from rayfl.examples import InputSpec

_PEOPLE = tuple(range(101, 110))
_ACTIVITIES = {
    1: "lying", 2: "sitting", 3: "standing", 4: "walking", 5: "running", 6: "cycling", 7: "Nordic walking",
    12: "ascending stairs", 13: "descending stairs", 16: "vacuum cleaning", 17: "ironing", 24: "rope jumping",
}  # fmt: skip
"""By the files' number: the activities of the protocol; 0 is what people do between them."""
_COLUMNS = 54
_TIME, _ACTIVITY = 0, 1
_UNITS, _UNIT_COLUMNS = (3, 20, 37), 17
"""First columns of the sensors at wrist, chest and ankle, which have 17 each."""
_SIGNALS = (1, 2, 3, 7, 8, 9, 10, 11, 12)
"""Of these: acceleration (up to 16 g, as the authors recommend), angular velocity, magnetic field. The others are the
temperature, an acceleration that saturates at 6 g, and an orientation that the authors call invalid."""
_CHANNELS = len(_UNITS) * len(_SIGNALS)
_LONGEST_GAP = 100
"""Rows (one second) without a number that are bridged; the radio loses some."""
_LONGEST_PAUSE_S = 1.0
"""A recording is one while its times go on within this many seconds."""


class Pamap2Source(ArchivedSource):
    """Configuration of PAMAP2 (Reiss and Stricker, 2012): twelve activities of nine people, at 100 Hz.

    A window is 27 signals along time, as images of shape (27, 1, window): of the sensors at wrist, chest and ankle the
    acceleration (m/s^2), angular velocity (rad/s) and magnetic field (microtesla) along x, y, z; a signal is a channel.
    All times of a window are of one activity. Gaps of up to a second are bridged by straight lines; windows with longer
    ones are left out.

    People are clients. The files are those of the folder ``Protocol``; what people do between activities is left out.
    """

    url: ClassVar[str] = "https://archive.ics.uci.edu/static/public/231/pamap2+physical+activity+monitoring.zip"
    archive: ClassVar[str] = "PAMAP2_Dataset.zip"
    folder: ClassVar[str] = "PAMAP2_Dataset"

    name: Literal["pamap2"] = Field(default="pamap2", description="Activities of nine people by sensors they wear.")
    part: Literal["both"] = Field(default="both", description="All windows; the files have no test part of their own.")
    window: int = Field(default=256, ge=8, le=10_000, description="Times of a window, 100 of them a second.")
    step: int = Field(
        default=128,
        ge=1,
        le=10_000,
        description="Times from the beginning of a window to that of the next; as many as window has: none is shared.",
    )

    @property
    def known_spec(self) -> InputSpec:
        """See the base class."""
        return InputSpec("image", (_CHANNELS, 1, self.window), len(_ACTIVITIES))

    def _members(self) -> tuple[str, ...]:
        return tuple(f"Protocol/subject{person}.dat" for person in _PEOPLE)

    def _choices(self) -> Mapping[str, Any]:
        return self.model_dump(mode="json", exclude={"root"})

    def _num_classes(self, rows: Rows) -> int:
        return len(_ACTIVITIES)

    def _remarks(self, rows: Rows, num_classes: int) -> list[Remark]:
        if not rows.left_out:
            return []
        return [
            Remark(
                f"{rows.left_out} windows of pamap2 are left out, since a sensor has no number for more than "
                f"{_LONGEST_GAP} times; {len(rows.y)} are used"
            )
        ]

    def _rows(self) -> Rows:
        tree = self._tree()
        codes = {number: code for code, number in enumerate(_ACTIVITIES)}
        x, y, clients, left_out = list[np.ndarray](), list[int](), list[str](), 0
        for person, name in zip(_PEOPLE, self._members(), strict=True):
            before = len(y)
            for activity, signals in self._runs(tree, name):
                windows = np.lib.stride_tricks.sliding_window_view(signals, self.window, axis=1)[:, :: self.step]
                whole = np.isfinite(windows).all(axis=(0, 2))
                left_out += int((~whole).sum())
                x.append(windows[:, whole].swapaxes(0, 1)[:, :, np.newaxis].astype(np.float32))
                y += [codes[activity]] * len(x[-1])
            if len(y) == before:
                raise DataError(
                    f"{tree.place(name)} has no window of {self.window} times of one activity without longer gaps: set "
                    "a smaller dataset.window, or get the file again"
                )
            clients += [f"subject_{person}"] * (len(y) - before)
        owners = np.array(clients, dtype=object)
        names = tuple(_ACTIVITIES.values())
        return Rows(
            np.concatenate(x), np.array(y), owners, None, False, len(names), class_names=names, left_out=left_out
        )

    def _runs(self, tree: FileTree, name: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the activity, and the signals of shape (channels, times), of each stretch that has a window."""
        place, content = self._content(tree, name)
        values = _numbers(place, content)
        times, activities = values[:, 0], values[:, 1]
        known = np.isin(activities, [*_ACTIVITIES, 0])
        if not np.isfinite(times).all() or not known.all():
            row = int(np.flatnonzero(~(np.isfinite(times) & known))[0])
            raise DataError(
                f"{place}, row {row}: time {times[row]:g} and activity {activities[row]:g} must be a number of seconds "
                f"and one of 0, {', '.join(map(str, _ACTIVITIES))}; get the file again"
            )
        pauses = np.diff(times)
        if (pauses <= 0).any():
            row = 1 + int(np.flatnonzero(pauses <= 0)[0])
            raise DataError(f"{place}, row {row}: the time {times[row]:g} is not after the one before it; get it again")
        cuts = 1 + np.flatnonzero((np.diff(activities) != 0) | (pauses > _LONGEST_PAUSE_S))
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(times)], strict=True):
            activity = int(activities[begin])
            if activity and end - begin >= self.window:
                yield activity, np.stack([_bridged(column) for column in values[begin:end, 2:].T])


def _numbers(place: str, content: bytes) -> np.ndarray:
    """Returns time, activity and signals of a file, of shape (rows, 2 + channels); nan where there is no number."""
    names = [str(column) for column in range(_COLUMNS)]
    wanted = [_TIME, _ACTIVITY, *(unit + signal for unit in _UNITS for signal in _SIGNALS)]
    try:
        table = pa.csv.read_csv(
            io.BytesIO(content),
            read_options=pa.csv.ReadOptions(column_names=names),
            parse_options=pa.csv.ParseOptions(delimiter=" "),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.float64()),
                include_columns=[names[column] for column in wanted],
                null_values=["NaN"],
            ),
        )
    except pa.ArrowInvalid as error:
        raise DataError(f"{place}: {error}; it must have {_COLUMNS} numbers a row, get it again") from error
    return np.stack([table.column(names[column]).to_numpy() for column in wanted], axis=1)


def _bridged(signal: np.ndarray) -> np.ndarray:
    """Returns the signal with gaps of up to ``_LONGEST_GAP`` times bridged by straight lines; others stay nan."""
    there = np.flatnonzero(np.isfinite(signal))
    if len(there) == len(signal) or not len(there):
        return signal
    at = np.arange(len(signal))
    after = np.minimum(np.searchsorted(there, at), len(there) - 1)
    gap = there[after] - there[np.maximum(after - 1, 0)] - 1
    inside = (at > there[0]) & (at < there[-1]) & (gap <= _LONGEST_GAP)
    bridged: np.ndarray = np.where(inside | np.isfinite(signal), np.interp(at, there, signal[there]), np.nan)
    return bridged
