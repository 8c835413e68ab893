"""Seconds per round and phase, a line of JSON each, in the run's folder.

Times differ from run to run, so they are kept apart from the tables, which do not.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import ClassVar

from rayfl.storage.files import Storage
from rayfl.tracking.callback import Callback, RunInfo

FILE = "timings.jsonl"
_NO_PHASE = ("round", "simulated")

_log = logging.getLogger("rayfl")


class Timings(Callback):
    """Keeps ``timings.jsonl``: ``{"round": 1, "clients": 0.8, "server": 0.1, "evaluation": 0.3, "commit": 0.0}``.

    Written in each round that is committed, just before its commit, so that no commit on storage has a round whose line
    a crash has taken. Rounds that are done again replace their lines.

    Args:
        storage: the run's folder.
        every: how many rounds there are from commit to commit.
        ours: whether the folder still is this process's, so that it is written to.
    """

    FILE: ClassVar[str] = FILE

    def __init__(self, storage: Storage, every: int = 1, ours: Callable[[], bool] = lambda: True) -> None:
        self._storage = storage
        self._every = every
        self._ours = ours
        self._lines: dict[int, str] = {}
        self._started = False

    def on_start(self, run: RunInfo) -> None:
        try:
            self._lines = {int(line["round"]): json.dumps(line) for line in read_lines(self._storage, self.FILE)}
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            _log.warning("%s in %s is damaged and begun again: %s", self.FILE, self._storage.uri, error)
        self._started = True

    def on_phases(self, rounds_completed: int, seconds: Mapping[str, float]) -> None:
        self.keep(rounds_completed, seconds)

    def keep(self, rounds_completed: int, values: Mapping[str, float]) -> None:
        """Notes a round, and writes what there is if the round is committed."""
        self.note(rounds_completed, values)
        if rounds_completed % self._every == 0:
            self._write_ours()

    def note(self, rounds_completed: int, values: Mapping[str, float]) -> None:
        """Makes the line of a round; seconds to microseconds."""
        rounded = {name: round(value, 6) for name, value in values.items()}
        self._lines[rounds_completed] = json.dumps({"round": rounds_completed, **rounded})

    def on_end(self, rounds_completed: int) -> None:
        self._write_ours()

    def _write_ours(self) -> None:
        # Without what was there before, or what another driver has written since, the file would be replaced by less.
        if self._started and self._ours():
            self._write()

    def _write(self) -> None:
        text = "".join(f"{line}\n" for _, line in sorted(self._lines.items()))
        self._storage.write(self.FILE, text.encode())


def seconds_spent(line: Mapping[str, float]) -> float:
    """The wall time of a round, given its line: of all phases, and not of a simulated system's virtual clock."""
    return sum(value for name, value in line.items() if name not in _NO_PHASE)


def read_timings(storage: Storage) -> list[dict[str, float]]:
    """The lines of ``timings.jsonl``, by ascending round; empty where there is none."""
    return read_lines(storage, FILE)


def read_lines(storage: Storage, file: str) -> list[dict[str, float]]:
    """The lines of such a file; empty where there is none."""
    if not storage.exists(file):
        return []
    return [json.loads(line) for line in storage.read(file).decode().splitlines()]
