"""Logs a sweep's experiments as they begin and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.sweep.trial import FAILURE, OBJECTIVE, ROUND
from rayfl.sweeps.trials import Sweep, Trial

_EVERY_S = 10.0
"""The rounds of an experiment are said at most so often, in seconds."""


class SweepProgress:
    """Listens to Ray Tune.

    Args:
        sweep: all experiments.
        left: those that are run, in contrast to those that only report again.
        say: takes the lines.
        failures: receives why an experiment failed, by name.
        judged: called with an experiment that the scheduler has stopped, and its rounds; None without a scheduler.
    """

    def __init__(
        self,
        sweep: Sweep,
        left: Sequence[Trial],
        say: Callable[[str], None],
        failures: dict[str, str],
        judged: Callable[[Trial, int], None] | None,
    ) -> None:
        self._sweep = sweep
        self._left = {trial.name for trial in left}
        self._say = say
        self._failures = failures
        self._judged = judged
        self._ended = 0
        self._said: dict[str, float] = {}

    def callback(self, tune: Any, running: Sequence[Trial]) -> Any:
        """The listener that Ray Tune takes."""
        progress = self

        class Listener(tune.Callback):  # type: ignore[misc]
            def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
                progress.started(running[trial.config["trial"]])

            def on_trial_result(
                self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
            ) -> None:
                progress.reported(running[trial.config["trial"]], result)

            def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
                progress.completed(running[trial.config["trial"]], trial.last_result)

            def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
                progress.failed(running[trial.config["trial"]], _reason(trial))

        return Listener()

    def started(self, trial: Trial) -> None:
        """An experiment begins or continues."""
        if trial.name in self._left:
            self._say(f"starts: {self._sweep.described(trial)}")

    def reported(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """An experiment has done some rounds: said now and then, of each apart."""
        now, rounds = time.monotonic(), int(result.get(ROUND, 0))
        if trial.name not in self._left or FAILURE in result or rounds >= trial.config.train.rounds:
            return
        if now - self._said.get(trial.name, -_EVERY_S) >= _EVERY_S:
            self._said[trial.name] = now
            objective = f", {result[OBJECTIVE]:.4f}" if OBJECTIVE in result else ""
            done = f"round {rounds}/{trial.config.train.rounds}{objective}"
            self._say(f"{time.strftime('%H:%M:%S')}  {done}: {self._sweep.described(trial)}")

    def completed(self, trial: Trial, last: dict[str, Any]) -> None:
        """An experiment has ended, was stopped, or has said why it failed."""
        if trial.name not in self._left:
            return
        rounds = int(last.get(ROUND, 0))
        if FAILURE in last:
            self.failed(trial, last[FAILURE])
            return
        objective = f", {last[OBJECTIVE]:.4f}" if OBJECTIVE in last else ""
        if rounds < trial.config.train.rounds:
            if self._judged is None:
                self.failed(trial, f"its process ended after {rounds} rounds, without an error")
                return
            self._judged(trial, rounds)
            self._end(f"stopped after {rounds} rounds{objective}", trial)
        else:
            self._end(f"finished{objective}", trial)

    def failed(self, trial: Trial, reason: str) -> None:
        """An experiment has ended for good."""
        if trial.name in self._left:
            self._failures[trial.name] = reason
            self._end(f"failed: {reason}", trial)

    def _end(self, how: str, trial: Trial) -> None:
        self._ended += 1
        self._say(f"[{self._ended}/{len(self._left)}] {self._sweep.described(trial)}: {how}")


def _reason(trial: Any) -> str:
    """The last line of what Ray Tune knows of an error."""
    error = trial.get_error()
    lines = str(error).strip().splitlines() if error is not None else []
    return lines[-1] if lines else "its process ended"
