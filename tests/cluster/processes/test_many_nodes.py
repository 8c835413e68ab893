"""Clusters of several nodes, a raylet each: nodes join and leave, runs share them, GPUs are logical."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.cluster_utils import Cluster

import rayfl
from cluster.rounds.session import loopback
from tests.support.experiments import assert_same, outcome, small_experiment, with_large_model
from tests.support.many_nodes_running import PATIENCE_S, ROOT, Running, logical_gpus, long_rounds

Start = Callable[..., Running]
ADDRESS = "127.0.0.1"
# Several processes start one after the other: on a busy machine that takes minutes.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster whose first node has no CPU for actors."""
    # On a busy machine a node's processes take longer to start than Ray waits for them.
    monkeypatch.setenv("RAY_agent_register_timeout_ms", "120000")
    with loopback():
        head = {"num_cpus": 0, "include_dashboard": False, "node_ip_address": ADDRESS}
        found = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield found
        finally:
            found.shutdown()


def add(cluster: Cluster, **resources: Any) -> Any:
    """A node that has joined."""
    with logical_gpus() if "num_gpus" in resources else nullcontext():
        return cluster.add_node(node_ip_address=ADDRESS, **resources)


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path) -> Iterator[Start]:
    """Starts runs on the cluster."""
    runs: list[Running] = []

    def start(config: dict[str, Any], gpus: str = "none") -> Running:
        runs.append(Running(tmp_path, cluster.address, config, gpus))
        return runs[-1]

    try:
        yield start
    finally:
        for run in runs:
            run.end()


def undisturbed(folder: Path, method: str, long: bool = False) -> None:
    config = small_experiment(folder, "calm", method, backend="inline")
    rayfl.run(long_rounds(config) if long else config)


@pytest.mark.slow
def test_two_nodes(cluster: Cluster, start: Start, tmp_path: Path) -> None:
    undisturbed(tmp_path, "superfed-mm")
    nodes = [add(cluster, num_cpus=1), add(cluster, num_cpus=2)]
    running = start(small_experiment(tmp_path, "two", "superfed-mm"))
    hosts = running.wait_for("after-0")
    assert Counter(host["node_id"] for host in hosts) == {nodes[0].node_id: 1, nodes[1].node_id: 2}
    running.finish()
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "two"))


@pytest.mark.slow
def test_a_node_joins_and_another_leaves_in_the_midst_of_a_round(
    cluster: Cluster, start: Start, tmp_path: Path
) -> None:
    undisturbed(tmp_path, "scaffold", long=True)
    first = add(cluster, num_cpus=1)
    running = start(long_rounds(small_experiment(tmp_path, "moving", "scaffold", startup_timeout_s=60)))
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
def test_two_runs_share_a_cluster(cluster: Cluster, start: Start, tmp_path: Path) -> None:
    undisturbed(tmp_path, "fedphp")
    add(cluster, num_cpus=1)
    add(cluster, num_cpus=2)
    runs = [
        start(small_experiment(tmp_path, name, "fedphp", num_actors=actors))
        for name, actors in (("one", 1), ("other", 2))
    ]
    assert [len(running.wait_for("after-0")) for running in runs] == [1, 2]
    runs[0].finish()
    assert len(runs[1].wait_for("after-1")) == 2
    runs[1].finish()
    for name in ("one", "other"):
        assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / name))


@pytest.mark.slow
def test_actors_are_placed_by_labels_between_a_least_and_a_most_number(
    cluster: Cluster, start: Start, tmp_path: Path
) -> None:
    undisturbed(tmp_path, "scaffold")
    meant = [add(cluster, num_cpus=2, labels={"kind": kind}) for kind in ("large", "larger")]
    add(cluster, num_cpus=2, labels={"kind": "small"})
    options = {"num_actors": "2:3", "label_selector": {"kind": "in(large, larger)"}}
    running = start(small_experiment(tmp_path, "chosen", "scaffold", **options))
    hosts = running.wait_for("after-0")
    assert len(hosts) == 3
    assert {host["node_id"] for host in hosts} == {node.node_id for node in meant}
    running.finish()
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "chosen"))
    refused = start(small_experiment(tmp_path, "refused", "scaffold", label_selector={"kind": "huge"}))
    output, _ = refused.process.communicate(timeout=PATIENCE_S)
    assert "the nodes with cluster.label_selector={kind: huge} have 0 CPUs and 0 GPUs" in output


def merging_run(cluster: Cluster, config: dict[str, Any], folder: Path, *more: str) -> dict[str, int]:
    """Runs an experiment; returns what its driver received of sums."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address}
    command = [sys.executable, "tests/support/merging_run.py", str(file), *more]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    counted: dict[str, int] = json.loads(ran.stdout.partition("COUNTED ")[2])
    return counted


@pytest.mark.slow
def test_each_node_sends_the_driver_one_sum_a_call(cluster: Cluster, tmp_path: Path) -> None:
    config = with_large_model(small_experiment(tmp_path, "merged", "fedavg", num_actors=4))
    rayfl.run(config | {"name": "calm", "cluster": {"backend": "inline"}})
    for _ in range(2):
        add(cluster, num_cpus=2)
    counted = merging_run(cluster, config, tmp_path)
    rounds = config["train"]["rounds"]
    # Two actors on each of two nodes: each node merges once a round, and sends one sum, of 19 MB in three pieces; the
    # sum of the updates' norms is a fourth.
    expected = {"run_apart": 4 * rounds, "merged": 2 * rounds, "sums": 2 * rounds, "pieces": 2 * 4 * rounds}
    assert counted == expected
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "merged"))


@pytest.mark.slow
def test_an_actor_that_dies_between_two_pieces_of_a_sum_leaves_nothing_of_it(cluster: Cluster, tmp_path: Path) -> None:
    """The second round is undone and repeated, with a new actor: the bits are those of an undisturbed run."""
    config = with_large_model(small_experiment(tmp_path, "struck", "scaffold", num_actors=2))
    rayfl.run(config | {"name": "calm", "cluster": {"backend": "inline"}})
    for _ in range(2):
        add(cluster, num_cpus=1)
    whole = merging_run(cluster, config | {"name": "whole"}, tmp_path)["pieces"]
    # The first of the two senders of the second round: one of its pieces is here, others are on their way or asked for.
    struck = merging_run(cluster, config, tmp_path, str(whole // 2 + 1))
    assert whole < struck["pieces"] < 3 * whole // 2
    assert struck["lost sums, round 1"] == 1
    for name in ("whole", "struck"):
        assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / name))


@pytest.mark.slow
def test_actors_share_gpus_evenly(cluster: Cluster, start: Start, tmp_path: Path) -> None:
    undisturbed(tmp_path, "superfed-mm")
    add(cluster, num_cpus=4, num_gpus=1)
    add(cluster, num_cpus=4, num_gpus=1)
    shared = {"actors_per_gpu": 6, "cpus_per_actor": 0.5, "num_actors": 4}
    config = small_experiment(tmp_path, "shared", "superfed-mm", **shared) | {"engine": {"mode": "looped"}}
    running = start(config, "logical")
    hosts = running.wait_for("after-0")
    assert Counter(Counter(host["gpu"] for host in hosts).values()) == {2: 2}
    running.finish()
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "shared"))


@pytest.mark.slow
def test_actors_on_other_gpus_than_meant_are_refused(cluster: Cluster, start: Start, tmp_path: Path) -> None:
    add(cluster, num_cpus=2, num_gpus=1)
    config = small_experiment(tmp_path, "mixed-up", "superfed-mm", actors_per_gpu=2)
    wrong = start(config, "mixed-up")
    output, _ = wrong.process.communicate(timeout=PATIENCE_S)
    assert "ResourceError: GPU 0 of the run is GPU-" in output
    assert "its actors are spread over two devices" in output
