"""Evaluations in the files that Ray Tune's runs have: ``result.json`` and ``progress.csv``."""

from __future__ import annotations

import csv
import io
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rayfl.storage import Storage
from rayfl.tracking.callback import Callback, RunInfo
from rayfl.tracking.scalars import scalars

JSON_FILE = "result.json"
CSV_FILE = "progress.csv"

_log = logging.getLogger("rayfl")


class TuneFiles(Callback):
    """Keeps a line of JSON and a row of CSV per round that was evaluated.

    ``training_iteration`` is the number of completed rounds, ``time_total_s`` the seconds since the run was (last)
    started, ``timestamp`` seconds since 1970; the others are numbers of summary rows by name
    (``rayfl.tracking.scalars``). Both files are written with every commit and have what it has: rounds that are done
    again replace theirs.

    Args:
        storage: the run's folder.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lines: dict[int, dict[str, Any]] = {}
        self._trial = ""
        self._started = time.monotonic()

    def on_start(self, run: RunInfo) -> None:
        self._trial = run.config.run_name
        try:
            self._lines = {int(line["training_iteration"]): line for line in read_results(self._storage)}
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            _log.warning("%s in %s is damaged and begun anew: %s", JSON_FILE, self._storage.uri, error)
        self._rewind(run.rounds_completed)

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        round = int(rows[0]["round"])
        about = {
            "training_iteration": round,
            "trial_id": self._trial,
            "timestamp": int(time.time()),
            "time_total_s": round_seconds(time.monotonic() - self._started),
        }
        self._lines[round] = {**self._lines.get(round, {}), **about, **scalars(rows)}

    def on_commit(self, rounds_completed: int) -> None:
        self._write(rounds_completed)

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self._rewind(rounds_completed)
        self._write(rounds_completed)

    def _rewind(self, rounds_completed: int) -> None:
        self._lines = {round: line for round, line in self._lines.items() if round <= rounds_completed}

    def _write(self, rounds_completed: int) -> None:
        lines = [line for round, line in sorted(self._lines.items()) if round <= rounds_completed]
        if not lines:
            return
        out = io.StringIO()
        writer = csv.DictWriter(out, list(dict.fromkeys(name for line in lines for name in line)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        self._storage.write(JSON_FILE, "".join(f"{json.dumps(line)}\n" for line in lines).encode())
        self._storage.write(CSV_FILE, out.getvalue().encode())


def round_seconds(seconds: float) -> float:
    """Seconds to the millisecond."""
    return round(seconds, 3)


def read_results(storage: Storage) -> list[dict[str, Any]]:
    """The lines of ``result.json``, by ascending round; empty where there is none."""
    if not storage.exists(JSON_FILE):
        return []
    return [json.loads(line) for line in storage.read(JSON_FILE).decode().splitlines()]
