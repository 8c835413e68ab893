"""Evaluations in the files that Ray Tune's runs have: ``result.json`` and ``progress.csv``."""

from __future__ import annotations

import csv
import io
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfl.errors import RunError
from rayfl.results.plain_csv import plain_cell
from rayfl.storage.files import Storage
from rayfl.storage.local_files import open_to_append
from rayfl.tracking.callback import Callback, RunInfo
from rayfl.tracking.scalars import scalars

JSON_FILE = "result.json"
CSV_FILE = "progress.csv"

_log = logging.getLogger("rayfl")


class TuneFiles(Callback):
    """Keeps a line of JSON and a row of CSV per round that was evaluated.

    ``training_iteration`` is the number of completed rounds, ``time_total_s`` the seconds since the run was (last)
    started, ``timestamp`` seconds since 1970; the others are numbers of summary rows by name
    (``rayfl.tracking.scalars``). With every commit both files come to have what it has: rounds that are done again
    replace theirs. On disks new rounds are appended; an object store gets the whole files.

    Args:
        storage: the run's folder.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lines: dict[int, dict[str, Any]] = {}
        self._trial = ""
        # What the files have, as long as they may be appended to.
        self._columns: list[str] | None = None
        self._written = 0
        self._started = time.monotonic()

    def on_start(self, run: RunInfo) -> None:
        self._trial = run.config.run_name
        try:
            self._lines = {int(line["training_iteration"]): line for line in read_results(self._storage)}
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            _log.warning("%s in %s is damaged and begun again: %s", JSON_FILE, self._storage.uri, error)
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
        new = [self._lines[round] for round in range(self._written + 1, rounds_completed + 1) if round in self._lines]
        folder = self._storage.local_path
        if folder is None or self._columns is None or any(line.keys() - set(self._columns) for line in new):
            self._write(rounds_completed)
        elif new:
            self._append(folder, new, rounds_completed)

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self._rewind(rounds_completed)
        self._write(rounds_completed)

    def _rewind(self, rounds_completed: int) -> None:
        self._lines = {round: line for round, line in self._lines.items() if round <= rounds_completed}

    def _write(self, rounds_completed: int) -> None:
        lines = [line for round, line in sorted(self._lines.items()) if round <= rounds_completed]
        if not lines:
            return
        self._columns = list(dict.fromkeys(name for line in lines for name in line))
        header = _as_csv([dict(zip(self._columns, self._columns, strict=True))], self._columns)
        self._storage.write(JSON_FILE, _as_json(lines).encode())
        self._storage.write(CSV_FILE, (header + _as_csv(lines, self._columns)).encode())
        self._written = rounds_completed

    def _append(self, folder: Path, lines: Sequence[Mapping[str, Any]], rounds_completed: int) -> None:
        assert self._columns is not None
        for name, text in ((JSON_FILE, _as_json(lines)), (CSV_FILE, _as_csv(lines, self._columns))):
            try:
                with open_to_append(folder / name) as file:
                    file.write(text)
            except OSError as error:
                self._columns = None  # what is there may end in the midst of a line: the files are written whole again
                raise RunError(f"cannot write {folder / name}: {error.strerror}") from error
        self._written = rounds_completed


def _as_json(lines: Sequence[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def _as_csv(lines: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    out = io.StringIO()
    rows = ({name: _cell(value) for name, value in line.items()} for line in lines)
    csv.DictWriter(out, columns, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    return plain_cell(value) if isinstance(value, str) else value


def round_seconds(seconds: float) -> float:
    """Seconds to the millisecond."""
    return round(seconds, 3)


def read_results(storage: Storage) -> list[dict[str, Any]]:
    """The lines of ``result.json``, by ascending round; empty where there is none."""
    if not storage.exists(JSON_FILE):
        return []
    whole, _, _ = storage.read(JSON_FILE).decode().rpartition("\n")  # a line may have been cut off by a crash
    return [json.loads(line) for line in whole.splitlines()]
