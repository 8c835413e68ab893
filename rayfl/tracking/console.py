"""What a person sees while a run goes on: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.live import Live

from rayfl.metrics import CLASSIFICATION
from rayfl.results.personalized import PersonalizedRows, of_clients
from rayfl.tracking.callback import Callback, RunInfo
from rayfl.tracking.live import LiveView

_log = logging.getLogger("rayfl")
_PLAIN_EVERY_S = 10.0


class ConsoleProgress(Callback):
    """Progress of a run on a console.

    Args:
        console: where to; the live view is drawn only if it is a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._view = LiveView(0, 0, ())
        self._rounds = 0
        self._score = ""
        self._own = PersonalizedRows("")
        self._first = CLASSIFICATION.first
        self._clients = 0
        self._last_line = 0.0

    def on_start(self, run: RunInfo) -> None:
        self._rounds = run.config.train.rounds
        self._own, self._clients = PersonalizedRows.of(run.config.algorithm), run.num_clients
        self._first = run.metrics[0]
        start = f"continues after round {run.rounds_completed}" if run.rounds_completed else "starts"
        devices = ", ".join(sorted({str(host["device"]) for host in run.hosts}))
        where = f"on {len(run.hosts)} {'actor' if len(run.hosts) == 1 else 'actors'} ({devices})"
        for line in run.plan:  # in the log already
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._say(
            f"{run.config.run_name} {start}: {run.config.algorithm.name} on {run.config.dataset.name}, "
            f"{run.num_clients} clients {where if run.hosts else 'in this process'}"
        )
        if self._console.is_terminal:
            self._view = LiveView(self._rounds, run.rounds_completed, run.hosts, self._first.label)
            self._live = Live(self._view, console=self._console, transient=True, refresh_per_second=4)
            self._live.start()

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        test = [row for row in rows if row["cohort"] == "all" and row["split"] == "test"]
        if not test:
            return
        shown = replace(self._first, digits=1) if self._first.unit == "%" else self._first
        name = shown.name
        parts = [f"global {shown.told(row[name])}" for row in test if row["model"] == "global"]
        # Never the best on test data: only the method's own personalized model, or a choice by validation.
        own = [row for row in test if self._own.is_summary(row) and row["model"] != "global"]
        parts += [f"{row['choice'] or row['model']} {shown.told(row[name])}" for row in own]
        fewest = min(int(row["clients"]) for row in test)
        whose = "" if fewest >= self._clients else f" of {of_clients(fewest, self._clients)} clients"
        self._score = f"test {shown.label}{whose}: " + ", ".join(parts)
        self._view.score = self._score
        curve = own or [row for row in test if row["model"] == "global"]
        if curve and curve[0][name] is not None:
            self._view.evaluated(int(rows[0]["round"]), float(curve[0][name]))
        _log.info("round %d: %s", rows[0]["round"], self._score)

    def on_evaluation_progress(self, clients_done: int, clients: int) -> None:
        self._view.state = f"evaluating {clients_done}/{clients}"
        if self._live is None and time.monotonic() - self._last_line >= _PLAIN_EVERY_S:
            self._last_line = time.monotonic()
            self._say(f"{self._view.state}  {self._score}")

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self._view.round_done(rounds_completed, cohort, seconds)
        due = rounds_completed == self._rounds or time.monotonic() - self._last_line >= _PLAIN_EVERY_S
        if self._live is None and due:
            self._last_line = time.monotonic()
            speed = f"{len(cohort) / seconds:.1f} clients/s"
            self._say(f"round {rounds_completed}/{self._rounds}  {speed}  {self._score}")

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self._view.rewound(rounds_completed)
        self._say(f"{reason}; continues from the commit of round {rounds_completed}")

    def on_end(self, rounds_completed: int) -> None:
        if self._live is not None:
            self._live.stop()

    def _say(self, text: str) -> None:
        _log.info("%s", text)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
