"""What Ray's dashboard and Prometheus show of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util import metrics

import rayfl
from actors.hosting.memory import Lookups
from cluster.rounds import gauges
from rayfl.tracking.callback import RunInfo
from tests.support.experiments import small_experiment


class Recorded:
    """A gauge that remembers what it was set to."""

    values: dict[tuple[str, str], list[float]]

    def __init__(self, name: str, description: str = "", tag_keys: Sequence[str] = ()) -> None:
        assert description and tuple(tag_keys) == ("run",)
        self._name = name

    def set_default_tags(self, tags: dict[str, str]) -> None:
        self._run = tags["run"]

    def set(self, value: float) -> None:
        self.values.setdefault((self._name, self._run), []).append(value)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], list[float]]:
    Recorded.values = {}
    monkeypatch.setattr(gauges, "Gauge", Recorded)
    return Recorded.values


class Actors(rayfl.Callback):
    """The names of the actors while the run goes on."""

    names: Sequence[str] = ()

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        found: Any = ray.util.list_named_actors(all_namespaces=True)
        self.names = sorted(actor["name"] for actor in found if actor["namespace"].startswith("rayfl-"))
        self.namespaces = {actor["namespace"] for actor in found if actor["namespace"].startswith("rayfl-")}

    def on_start(self, run: RunInfo) -> None:
        self.run = run


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_names_and_gauges(tmp_path: Path, recorded: dict[tuple[str, str], list[float]]) -> None:
    listener = Actors()
    rayfl.run(small_experiment(tmp_path, "seen", "scaffold", num_actors=2), callbacks=[listener])
    assert listener.names == ["rayfl-host-00", "rayfl-host-01"]
    [namespace] = listener.namespaces
    assert namespace.startswith("rayfl-seen-")
    assert set(recorded) == {
        (f"rayfl_{name}", "seen")
        for name in ("round", "rounds", "clients_per_second", "state_bytes", "cache_hits", "cache_misses")
    }
    assert recorded["rayfl_rounds", "seen"] == [4]
    assert recorded["rayfl_round", "seen"] == [0, 1, 2, 3, 4]
    assert all(speed > 0 for speed in recorded["rayfl_clients_per_second", "seen"])
    assert recorded["rayfl_state_bytes", "seen"][-1] > 1000
    # Round 1: the data of all in the cohort are read, and nobody has a state. Round 4: most was there before.
    hits, misses = (recorded[f"rayfl_cache_{kind}", "seen"] for kind in ("hits", "misses"))
    assert len(hits) == len(misses) == 4
    assert misses[0] >= 1
    assert hits[-1] > hits[0]
    # An actor reads a split of a client once; clients may move between the two.
    assert sum(misses) <= 5 * 3 * 2
    # The same names are free again at once, in a namespace of the next run's own.
    rayfl.run(small_experiment(tmp_path, "next", "fedavg", num_actors=2), callbacks=[listener])
    assert listener.names == ["rayfl-host-00", "rayfl-host-01"]
    assert listener.namespaces != {namespace}


def test_a_run_in_this_process_has_no_gauges(tmp_path: Path, recorded: dict[tuple[str, str], list[float]]) -> None:
    rayfl.run(small_experiment(tmp_path, "inline", "fedavg", backend="inline"))
    assert not recorded


def test_ray_takes_the_gauges() -> None:
    one = gauges.Gauges("a", lambda: 7, lambda: Lookups(3, 4))
    one.on_round(3, [1, 2], 0.5)
    one.on_commit(3)
    assert isinstance(one._round, metrics.Gauge)
    assert one._round.info["default_tags"] == {"run": "a"}
