"""A run's progress as Ray metrics, for Prometheus and Grafana (``templates/grafana.json``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ray.util.metrics import Gauge

from rayfl.tracking.callback import Callback, RunInfo


class Gauges(Callback):
    """Keeps four gauges per run, told apart by the label ``run``; nothing is kept per client.

    ``rayfl_round`` and ``rayfl_rounds`` (completed, and how many there will be), ``rayfl_clients_per_second`` (of the
    last round), ``rayfl_state_bytes`` (client states in the last commit).

    Args:
        run: the run's name.
        state_bytes: size of the client states in the last commit, in bytes.
    """

    def __init__(self, run: str, state_bytes: Callable[[], int]) -> None:
        self._state_bytes = state_bytes
        self._round = _gauge("rayfl_round", "completed rounds", run)
        self._rounds = _gauge("rayfl_rounds", "rounds the run will have", run)
        self._speed = _gauge("rayfl_clients_per_second", "clients trained per second in the last round", run)
        self._bytes = _gauge("rayfl_state_bytes", "bytes of client states in the last commit", run)

    def on_start(self, run: RunInfo) -> None:
        self._rounds.set(run.config.train.rounds)
        self._round.set(run.rounds_completed)

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self._round.set(rounds_completed)
        self._speed.set(len(cohort) / seconds)

    def on_commit(self, rounds_completed: int) -> None:
        self._bytes.set(self._state_bytes())

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self._round.set(rounds_completed)


def _gauge(name: str, description: str, run: str) -> Gauge:
    gauge = Gauge(name, description=description, tag_keys=("run",))
    gauge.set_default_tags({"run": run})
    return gauge
