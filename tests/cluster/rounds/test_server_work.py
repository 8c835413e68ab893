"""The server's own work on real actors: which one does it changes no bit, nor does the loss of one in its midst."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import rayfl
from algorithms.feddf import FedDF
from algorithms.registry import Experiment
from cluster.replay import replay
from rayfl.engine.server import Server
from rayfl.params import Tree
from rayfl.runs.folder import open_run
from tests.support.experiments import assert_same, outcome, small_experiment


class DyingServer(FedDF):
    """FedDF whose process ends in the server's own work of the second round, once.

    Attributes:
        marker: a file that is there when that has been done; its content is the process that ended.
    """

    name: str = "dying_server"  # type: ignore[assignment]
    marker: str

    async def distil(self, server: Server, **given: Any) -> Tree:
        found = await super().distil(server, **given)
        if server.round == 1 and not Path(self.marker).exists():
            Path(self.marker).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return found


class Failures(rayfl.Callback):
    """Notes what is said of failures."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self.reasons.append(reason)


def dying(folder: Path, name: str, marker: Path, **cluster: Any) -> dict[str, Any]:
    method = {"name": "tests.cluster.rounds.test_server_work:DyingServer", "marker": str(marker), "distill_steps": 20}
    return {**small_experiment(folder, name, "feddf", **cluster), "algorithm": method}


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_an_actor_that_is_lost_in_the_servers_work_costs_no_bit(tmp_path: Path) -> None:
    marker, failures = tmp_path / "marker", Failures()
    rayfl.run(dying(tmp_path, "killed", marker, num_actors=2), callbacks=[failures])
    assert int(marker.read_text()) != os.getpid()
    assert len(failures.reasons) == 1
    assert "it had distil of the server in round 2" in failures.reasons[0]
    rayfl.run(dying(tmp_path, "calm", marker, backend="inline"))
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "killed"))


@pytest.mark.parametrize("method", ["feddf", "fedgen", "pfedhn"])
@pytest.mark.first_case
def test_a_round_with_it_is_replayed_to_the_same_bits(method: str, tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "run", method, backend="inline")
    rayfl.run(config | {"storage": {"keep_commits": 4}})
    run = open_run(str(tmp_path / "run"), Experiment)
    found = replay(run, 3, run.parts.cohort(2)[0], whole=True)
    assert found.differences == {}
    assert found.compared["server"] > 0
