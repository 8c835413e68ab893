"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from rayfl.tracking.callback import Callback, RunInfo

_log = logging.getLogger("rayfl")
_PLAIN_EVERY_S = 10.0


class ConsoleProgress(Callback):
    """Progress of a run on a console.

    Args:
        console: where to; a bar is drawn only if it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._rounds = 0
        self._accuracy = ""
        self._personalized = ""
        self._last_line = 0.0

    def on_start(self, run: RunInfo) -> None:
        self._rounds = run.config.train.rounds
        self._personalized = run.config.algorithm.personalized
        start = f"continues after round {run.rounds_completed}" if run.rounds_completed else "starts"
        devices = ", ".join(sorted({str(host["device"]) for host in run.hosts}))
        where = f"on {len(run.hosts)} {'actor' if len(run.hosts) == 1 else 'actors'} ({devices})"
        self._say(
            f"{run.config.run_name} {start}: {run.config.algorithm.name} on {run.config.dataset.name}, "
            f"{run.num_clients} clients {where if run.hosts else 'in this process'}"
        )
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("round"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=self._rounds, completed=run.rounds_completed, note="")
            self._bar.start()

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        test = [row for row in rows if row["cohort"] == "all" and row["split"] == "test"]
        if not test:
            return
        parts = [f"global {row['top1']:.1%}" for row in test if row["model"] == "global"]
        # Never the best on test data: only the method's own personalized model, or a choice by validation.
        parts += [
            f"{row['choice'] or row['model']} {row['top1']:.1%}"
            for row in test
            if row["selected_on"] == "validation" or row["model"] == self._personalized != "global"
        ]
        self._accuracy = "test accuracy: " + ", ".join(parts)
        _log.info("round %d: %s", rows[0]["round"], self._accuracy)

    def on_evaluation_progress(self, clients_done: int, clients: int) -> None:
        note = f"evaluating {clients_done}/{clients}  {self._accuracy}"
        if self._bar is not None:
            self._bar.update(self._task, note=note)
        elif time.monotonic() - self._last_line >= _PLAIN_EVERY_S:
            self._last_line = time.monotonic()
            self._say(note)

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        note = f"{len(cohort) / seconds:.1f} clients/s  {self._accuracy}"
        if self._bar is not None:
            self._bar.update(self._task, completed=rounds_completed, note=note)
        elif rounds_completed == self._rounds or time.monotonic() - self._last_line >= _PLAIN_EVERY_S:
            self._last_line = time.monotonic()
            self._say(f"round {rounds_completed}/{self._rounds}  {note}")

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=rounds_completed)
        self._say(f"{reason}; continues from the commit of round {rounds_completed}")

    def on_end(self, rounds_completed: int) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _say(self, text: str) -> None:
        _log.info("%s", text)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
