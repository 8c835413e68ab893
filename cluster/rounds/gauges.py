"""A run's progress as Ray metrics, for Prometheus and Grafana (``templates/grafana.json``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ray.util.metrics import Gauge

from actors.hosting.memory import Lookups
from rayfl.tracking.callback import Callback, RunInfo


class Gauges(Callback):
    """Keeps a few gauges per run, with the label ``run``; none per client.

    ``rayfl_round`` and ``rayfl_rounds`` (completed, and how many there will be), ``rayfl_clients_per_second`` (of the
    last round), ``rayfl_state_bytes`` (files with client states in the last commit), ``rayfl_cache_hits`` and
    ``rayfl_cache_misses`` (how often in the last round a client's state or samples were in an actor's memory, and how
    often they had to be read).

    Args:
        run: the run's name.
        state_bytes: size of the files with client states in the last commit, in bytes.
        lookups: hits and misses of the last round.
    """

    def __init__(self, run: str, state_bytes: Callable[[], int], lookups: Callable[[], Lookups]) -> None:
        self._state_bytes = state_bytes
        self._lookups = lookups
        self._round = _gauge("rayfl_round", "completed rounds", run)
        self._rounds = _gauge("rayfl_rounds", "rounds the run will have", run)
        self._speed = _gauge("rayfl_clients_per_second", "clients trained per second in the last round", run)
        self._bytes = _gauge("rayfl_state_bytes", "bytes of the files with client states in the last commit", run)
        self._hits = _gauge("rayfl_cache_hits", "states and samples found in memory in the last round", run)
        self._misses = _gauge("rayfl_cache_misses", "states and samples read in the last round", run)

    def on_start(self, run: RunInfo) -> None:
        self._rounds.set(run.config.train.rounds)
        self._round.set(run.rounds_completed)

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self._round.set(rounds_completed)
        self._speed.set(len(cohort) / seconds)
        lookups = self._lookups()
        self._hits.set(lookups.hits)
        self._misses.set(lookups.misses)

    def on_commit(self, rounds_completed: int) -> None:
        self._bytes.set(self._state_bytes())

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self._round.set(rounds_completed)


def _gauge(name: str, description: str, run: str) -> Gauge:
    gauge = Gauge(name, description=description, tag_keys=("run",))
    gauge.set_default_tags({"run": run})
    return gauge
