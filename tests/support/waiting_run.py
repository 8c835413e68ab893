"""Runs an experiment and waits after a round: ``python waiting_run.py CONFIG ROUND FILE`` until FILE exists."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import rayfl


class Waiting(rayfl.Callback):
    """Waits after a round, and says so."""

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        if rounds_completed == int(sys.argv[2]):
            print("waiting", flush=True)
            while not Path(sys.argv[3]).exists():
                time.sleep(0.05)


if __name__ == "__main__":
    rayfl.run(sys.argv[1], callbacks=[Waiting()])
