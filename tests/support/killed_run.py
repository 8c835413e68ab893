"""Runs an experiment and kills its own process at a chosen moment.

``python killed_run.py CONFIG MOMENT ROUND [train.rounds=N]``
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

import rayfl


class Killer(rayfl.Callback):
    """Kills the driver inside a round (trained, not yet aggregated into a commit) or between two rounds.

    Inside a round the commit of the one before may still be written: it is waited for.
    """

    def __init__(self, moment: str, round: int, commits: Path) -> None:
        self._moment = moment
        self._round = round
        self._commits = commits

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._moment == "inside" and rows[0]["round"] == self._round:
            while self._round > 1 and not list(self._commits.glob(f"manifest-{self._round - 1:06}.json")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        if self._moment == "between" and rounds_completed == self._round:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    given = {path: int(value) for path, _, value in (pair.partition("=") for pair in sys.argv[4:])}
    source = Path(sys.argv[1])
    config = yaml.safe_load((source / "config.yaml" if source.is_dir() else source).read_text())
    folder = Path(config["storage_path"]) / config["name"] / "commits"
    rayfl.run(sys.argv[1], callbacks=[Killer(sys.argv[2], int(sys.argv[3]), folder)], **given)
