"""Runs an experiment and kills its own process at a chosen moment.

``python killed_run.py CONFIG MOMENT ROUND [train.rounds=N]``
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import rayfl


class Killer(rayfl.Callback):
    """Kills the driver inside a round (trained, not yet aggregated into a commit) or between two rounds."""

    def __init__(self, moment: str, round: int) -> None:
        self._moment = moment
        self._round = round

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._moment == "inside" and rows[0]["round"] == self._round:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        if self._moment == "between" and rounds_completed == self._round:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    given = {path: int(value) for path, _, value in (pair.partition("=") for pair in sys.argv[4:])}
    rayfl.run(sys.argv[1], callbacks=[Killer(sys.argv[2], int(sys.argv[3]))], **given)
