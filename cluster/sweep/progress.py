"""Prints a line when an experiment of a sweep starts, advances or ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.sweep.folder import committed
from cluster.sweep.trial import FAILURE, OBJECTIVE, ROUND
from rayfl.sweeps.measures import Measure
from rayfl.sweeps.trials import Sweep, Trial
from rayfl.tracking.live import clock

_EVERY_S = 10.0
"""Minimum number of seconds between two lines about an experiment's rounds."""


class SweepProgress:
    """Listens to Ray Tune.

    Args:
        sweep: all experiments.
        left: experiments that are run; the others only report their earlier results.
        measure: number that experiments are compared by.
        say: prints a line.
        failures: receives the reasons of failures, by name.
        judged: called with an experiment that the scheduler has stopped, and its rounds; None without a scheduler.
    """

    def __init__(
        self,
        sweep: Sweep,
        left: Sequence[Trial],
        measure: Measure,
        say: Callable[[str], None],
        failures: dict[str, str],
        judged: Callable[[Trial, int], None] | None,
    ) -> None:
        self._sweep = sweep
        self._left = {trial.name for trial in left}
        self._measure = measure
        self._say = say
        self._failures = failures
        self._judged = judged
        self._ended = 0
        self._said: dict[str, float] = {}
        self._first: dict[str, tuple[float, int]] = {}

    def callback(self, tune: Any, running: Sequence[Trial]) -> Any:
        """Returns the callback for Ray Tune."""
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

            def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
                progress.died(running[trial.config["trial"]], _reason(trial))

            def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
                progress.failed(running[trial.config["trial"]], _reason(trial))

        return Listener()

    def started(self, trial: Trial) -> None:
        """Reports that an experiment starts or continues."""
        if trial.name in self._left:
            self._say(f"starts: {self._sweep.described(trial)}")

    def reported(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """Reports the rounds of an experiment, at most once in ten seconds."""
        now, rounds = time.monotonic(), int(result.get(ROUND, 0))
        self._first.setdefault(trial.name, (now, rounds))
        if trial.name not in self._left or FAILURE in result or rounds >= trial.config.train.rounds:
            return
        if now - self._said.get(trial.name, -_EVERY_S) >= _EVERY_S:
            self._said[trial.name] = now
            done = f"round {rounds}/{trial.config.train.rounds}"
            parts = [time.strftime("%H:%M:%S"), done, *self._pace(trial, now, rounds), *self._score(result)]
            self._say(f"{'  '.join(parts)}: {self._sweep.described(trial)}")

    def completed(self, trial: Trial, last: dict[str, Any]) -> None:
        """Reports that an experiment has finished, was stopped, or has failed."""
        if trial.name not in self._left:
            return
        rounds = int(last.get(ROUND, 0))
        if FAILURE in last:
            self.failed(trial, last[FAILURE])
            return
        objective = "".join(f", {score}" for score in self._score(last))
        early = rounds < trial.config.train.rounds and committed(trial).ended_early
        if rounds < trial.config.train.rounds and not early:
            if self._judged is None:
                self.failed(trial, f"its process ended after {rounds} rounds, without an error")
                return
            self._judged(trial, rounds)
            self._end(f"stopped after {rounds} rounds{objective}", trial)
        else:
            self._end(f"finished{f' early, after {rounds} rounds' if early else ''}{objective}", trial)

    def _pace(self, trial: Trial, now: float, rounds: int) -> list[str]:
        """Returns the seconds a round since the first report, with evaluations and commits, and the time left."""
        since, before = self._first[trial.name]
        if rounds <= before:
            return []
        seconds = (now - since) / (rounds - before)
        return [f"{seconds:.3g} s a round", f"{clock(seconds * (trial.config.train.rounds - rounds))} left"]

    def _score(self, result: Mapping[str, Any]) -> list[str]:
        if OBJECTIVE not in result:
            return []
        metric = self._measure.shown
        return [f"{self._measure.judge} {metric.label} {metric.told(result[OBJECTIVE])}"]

    def died(self, trial: Trial, reason: str) -> None:
        """Reports that an experiment's process has died, and that another one will go on with it."""
        if trial.name in self._left:
            self._say(f"its process died, and goes on from its last commit: {self._sweep.described(trial)} ({reason})")

    def failed(self, trial: Trial, reason: str) -> None:
        """Reports that an experiment has failed."""
        if trial.name in self._left:
            self._failures[trial.name] = reason
            self._end(f"failed: {reason}", trial)

    def _end(self, how: str, trial: Trial) -> None:
        self._ended += 1
        self._say(f"[{self._ended}/{len(self._left)}] {self._sweep.described(trial)}: {how}")


def _reason(trial: Any) -> str:
    """Returns the last line of Ray Tune's error."""
    error = trial.get_error()
    lines = str(error).strip().splitlines() if error is not None else []
    return lines[-1] if lines else "its process ended"
