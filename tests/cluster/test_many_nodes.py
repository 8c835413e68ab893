"""Clusters of several nodes, a raylet each: nodes join and leave, runs share them, GPUs are logical."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.cluster_utils import Cluster

import rayfl
from cluster.session import _loopback
from tests.cluster.experiments import assert_same, outcome, small_experiment

ROOT = Path(__file__).parents[2]
SCRIPT = "tests/cluster/many_nodes_run.py"
PATIENCE_S = 200
ADDRESS = "127.0.0.1"
# Several processes start one after the other: on a busy machine that takes minutes.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster whose first node has no CPU for actors."""
    # On a busy machine a node's processes take longer to start than Ray waits for them.
    monkeypatch.setenv("RAY_agent_register_timeout_ms", "120000")
    with _loopback():
        head = {"num_cpus": 0, "include_dashboard": False, "node_ip_address": ADDRESS}
        found = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield found
        finally:
            found.shutdown()


def add(cluster: Cluster, **resources: float) -> Any:
    """A node that has joined."""
    return cluster.add_node(node_ip_address=ADDRESS, **resources)


class Running:
    """A run in a process of its own.

    Args:
        folder: of the run and the messages.
        address: of the cluster.
        config: of the run.
        gpus: see ``many_nodes_run.py``.
    """

    def __init__(self, folder: Path, address: str, config: dict[str, Any], gpus: str = "none") -> None:
        self.log = folder / config["name"] / "rayfl.log"
        self._messages = folder / f"messages-{config['name']}"
        self._messages.mkdir()
        self._rounds = config["train"]["rounds"]
        file = folder / f"{config['name']}.yaml"
        file.write_text(yaml.safe_dump(config))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address}
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, str(file), str(self._messages), gpus],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, name: str) -> Any:
        """What the run says at this point."""
        message = self._messages / name
        ends = time.monotonic() + PATIENCE_S
        while not message.exists():
            assert self.process.poll() is None, self.process.stdout and self.process.stdout.read()
            assert time.monotonic() < ends, f"no {name} within {PATIENCE_S} s"
            time.sleep(0.05)
        return json.loads(message.read_text())

    def go(self, round: int, actors: int = 0) -> None:
        """Lets the run go on after a round, as soon as it has so many actors."""
        new = self._messages / "new"
        new.write_text(str(actors))
        new.rename(self._messages / f"go-{round}")

    def finish(self) -> None:
        """Lets the run go on to its end."""
        for round in range(1, self._rounds + 1):
            if not (self._messages / f"go-{round}").exists():
                self.go(round)
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, output


def long_rounds(config: dict[str, Any]) -> dict[str, Any]:
    """Rounds of some tenths of a second: a node that goes after one is missed in the next."""
    return config | {"train": config["train"] | {"local_epochs": 60}}


def undisturbed(folder: Path, method: str, long: bool = False) -> None:
    config = small_experiment(folder, "calm", method, backend="inline")
    rayfl.run(long_rounds(config) if long else config)


@pytest.mark.slow
def test_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    undisturbed(tmp_path, "superfed-mm")
    nodes = [add(cluster, num_cpus=1), add(cluster, num_cpus=2)]
    running = Running(tmp_path, cluster.address, small_experiment(tmp_path, "two", "superfed-mm"))
    hosts = running.wait_for("after-0")
    assert Counter(host["node_id"] for host in hosts) == {nodes[0].node_id: 1, nodes[1].node_id: 2}
    running.finish()
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "two"))


@pytest.mark.slow
def test_a_node_joins_and_another_leaves_in_the_midst_of_a_round(cluster: Cluster, tmp_path: Path) -> None:
    undisturbed(tmp_path, "scaffold", long=True)
    first = add(cluster, num_cpus=1)
    config = long_rounds(small_experiment(tmp_path, "moving", "scaffold", startup_timeout_s=60))
    running = Running(tmp_path, cluster.address, config)
    assert len(running.wait_for("after-0")) == 1
    running.wait_for("after-1")
    add(cluster, num_cpus=2)
    time.sleep(2)  # it looks around every two seconds
    running.go(1)
    running.wait_for("after-2")
    running.go(2, actors=3)
    assert len(running.wait_for("after-3")) == 3
    assert "2 actors joined the run, 3 now" in running.log.read_text()
    running.go(3)
    cluster.remove_node(first, allow_graceful=False)
    assert "died" in running.wait_for("failure")
    running.finish()
    assert "goes on with 2 actors instead of 3" in running.log.read_text()
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "moving"))


@pytest.mark.slow
def test_two_runs_share_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    undisturbed(tmp_path, "fedphp")
    add(cluster, num_cpus=1)
    add(cluster, num_cpus=2)
    runs = [
        Running(tmp_path, cluster.address, small_experiment(tmp_path, name, "fedphp", num_actors=actors))
        for name, actors in (("one", 1), ("other", 2))
    ]
    assert [len(running.wait_for("after-0")) for running in runs] == [1, 2]
    runs[0].finish()
    assert len(runs[1].wait_for("after-1")) == 2
    runs[1].finish()
    for name in ("one", "other"):
        assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / name))


@pytest.mark.slow
def test_actors_share_gpus_evenly(cluster: Cluster, tmp_path: Path) -> None:
    undisturbed(tmp_path, "superfed-mm")
    add(cluster, num_cpus=4, num_gpus=1)
    add(cluster, num_cpus=4, num_gpus=1)
    shared = {"actors_per_gpu": 6, "cpus_per_actor": 0.5, "num_actors": 4}
    config = small_experiment(tmp_path, "shared", "superfed-mm", **shared) | {"engine": {"mode": "looped"}}
    running = Running(tmp_path, cluster.address, config, "logical")
    hosts = running.wait_for("after-0")
    assert Counter(Counter(host["gpu"] for host in hosts).values()) == {2: 2}
    running.finish()
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "shared"))


@pytest.mark.slow
def test_actors_on_other_gpus_than_meant_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    add(cluster, num_cpus=2, num_gpus=1)
    config = small_experiment(tmp_path, "mixed-up", "superfed-mm", actors_per_gpu=2)
    wrong = Running(tmp_path, cluster.address, config, "mixed-up")
    output, _ = wrong.process.communicate(timeout=PATIENCE_S)
    assert "ResourceError: GPU 0 of the run is GPU-" in output
    assert "its actors are spread over two devices" in output
