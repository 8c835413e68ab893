"""What a person sees while a run goes on: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live

from rayfl.metrics import CLASSIFICATION
from rayfl.results.personalized import PersonalizedRows
from rayfl.tracking.callback import Callback, RunInfo
from rayfl.tracking.live import LiveView, newcomers_text, score_text

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
        for line in run.promises:
            self._say(line)
        self._view = LiveView(self._rounds, run.rounds_completed, run.hosts, self._first.label)
        if self._console.is_terminal:
            self._live = Live(self._view, console=self._console, transient=True, refresh_per_second=4)
            self._live.start()

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        unseen = [row for row in rows if row["cohort"] == "unseen" and row["split"] == "test"]
        if unseen:
            self._view.newcomers = newcomers_text(unseen, self._own, self._first)
            _log.info("round %d: %s", rows[0]["round"], self._view.newcomers)
        test = [row for row in rows if row["cohort"] == "all" and row["split"] == "test"]
        if not test:
            return
        self._view.score, curve = score_text(test, self._own, self._clients, self._first)
        if curve is not None:
            self._view.evaluated(int(rows[0]["round"]), curve)
        _log.info("round %d: %s", rows[0]["round"], self._view.score)

    def on_evaluation_progress(self, clients_done: int, clients: int) -> None:
        self._view.state = f"evaluating {clients_done}/{clients}"
        if self._live is None and time.monotonic() - self._last_line >= _PLAIN_EVERY_S:
            self._last_line = time.monotonic()
            self._say(f"{self._view.line()}  {self._view.state}")

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self._view.round_done(rounds_completed, cohort, seconds)
        due = rounds_completed == self._rounds or time.monotonic() - self._last_line >= _PLAIN_EVERY_S
        if self._live is None and due:
            self._last_line = time.monotonic()
            self._say(self._view.line())

    def on_early_end(self, rounds_completed: int, why: str) -> None:
        self._console.print(
            f"Ends early, after round {rounds_completed} of {self._rounds}: {why}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self._view.rewound(rounds_completed)
        now = time.strftime("%H:%M:%S")
        self._say(f"{now}  {reason}; continues from the commit of round {rounds_completed}")

    def on_end(self, rounds_completed: int) -> None:
        if self._live is not None:
            self._live.stop()

    def _say(self, text: str) -> None:
        _log.info("%s", text)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
