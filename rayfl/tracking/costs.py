"""What each round took, a line of JSON each, in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rayfl.storage.files import Storage
from rayfl.tracking.timings import Timings, read_lines

FILE = "costs.jsonl"


class CostLines(Timings):
    """Keeps ``costs.jsonl``, such as ``{"round": 1, "client_seconds": 0.8, "peak_bytes": 300000000, "flops": 12000}``.

    Lines of committed rounds also have ``states``, how many clients had a state, and ``state_mean_bytes``, what one of
    these states takes on storage on average, where that is known. Both are written with the next round's line.

    Args:
        storage: the run's folder.
        states: how many clients have a state in the last commit, and the bytes of one on average; None: not known.
        every: see :class:`Timings`.
        ours: see :class:`Timings`.
    """

    FILE = FILE

    def __init__(
        self,
        storage: Storage,
        states: Callable[[], tuple[int, float | None]],
        every: int = 1,
        ours: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(storage, every, ours)
        self._states = states

    def on_phases(self, rounds_completed: int, seconds: Mapping[str, float]) -> None:
        """Times are in a file of their own."""

    def on_costs(self, rounds_completed: int, costs: Mapping[str, float]) -> None:
        self.keep(rounds_completed, costs)

    def on_commit(self, rounds_completed: int) -> None:
        count, size = self._states()
        line: dict[str, Any] = json.loads(self._lines.get(rounds_completed, "{}"))
        line.pop("round", None)
        known = {} if size is None else {"state_mean_bytes": size}
        self.note(rounds_completed, {**line, "states": count, **known})


def read_costs(storage: Storage) -> list[dict[str, float]]:
    """The lines of ``costs.jsonl``, by ascending round; empty where there is none."""
    return read_lines(storage, FILE)
