"""Listeners that no run ends for: what they write is least important."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rayfl.results.summaries import Scores
from rayfl.tracking.callback import Callback, RunInfo

_log = logging.getLogger("rayfl")


class Guarded(Callback):
    """Passes everything on; the first error is a warning, and no error reaches the run.

    A listener whose start has failed hears nothing more but the end; others go on, for a disk may have room again.

    Args:
        listener: the listener.
        writes: what it writes, for the warning: a file, or a service.
    """

    def __init__(self, listener: Callback, writes: str) -> None:
        self._listener = listener
        self._writes = writes
        self._said = False
        self._started = False

    def on_start(self, run: RunInfo) -> None:
        self._started = self._tried(self._listener.on_start, run)

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self._tell(self._listener.on_round, rounds_completed, cohort, seconds)

    def on_phases(self, rounds_completed: int, seconds: Mapping[str, float]) -> None:
        self._tell(self._listener.on_phases, rounds_completed, seconds)

    def on_costs(self, rounds_completed: int, costs: Mapping[str, float]) -> None:
        self._tell(self._listener.on_costs, rounds_completed, costs)

    def on_evaluation_progress(self, clients_done: int, clients: int) -> None:
        self._tell(self._listener.on_evaluation_progress, clients_done, clients)

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._tell(self._listener.on_evaluation, rows)

    def on_scores(self, rounds_completed: int, cohort: str, phase: str, scores: Scores) -> None:
        self._tell(self._listener.on_scores, rounds_completed, cohort, phase, scores)

    def on_commit(self, rounds_completed: int) -> None:
        self._tell(self._listener.on_commit, rounds_completed)

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self._tell(self._listener.on_failure, reason, rounds_completed)

    def on_early_end(self, rounds_completed: int, why: str) -> None:
        self._tell(self._listener.on_early_end, rounds_completed, why)

    def on_end(self, rounds_completed: int) -> None:
        self._tried(self._listener.on_end, rounds_completed)

    def _tell(self, hear: Callable[..., None], *arguments: Any) -> None:
        if self._started:
            self._tried(hear, *arguments)

    def _tried(self, hear: Callable[..., None], *arguments: Any) -> bool:
        try:
            hear(*arguments)
        except Exception as error:
            if not self._said:
                self._said = True
                _log.warning("%s lacks something from here on (%s); the run goes on", self._writes, _reason(error))
            return False
        return True


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
