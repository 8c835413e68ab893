"""Two nodes with a logical GPU each, whose actors compute on the CPU: both are measured, and shared as was found."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

import rayfl
from cluster.rounds.session import loopback
from tests.support.experiments import assert_same, outcome, small_experiment
from tests.support.many_nodes_running import Running, logical_gpus

ADDRESS = "127.0.0.1"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gpus_are_measured_and_shared_by_as_many_actors_as_the_round_has_work_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rayfl.run(small_experiment(tmp_path, "calm", "superfed-mm", backend="inline"))
    config = small_experiment(tmp_path, "shared", "superfed-mm", actors_per_gpu="auto") | {"engine": {"mode": "looped"}}
    # On a busy machine a node's processes take longer to start than Ray waits for them.
    monkeypatch.setenv("RAY_agent_register_timeout_ms", "120000")
    with loopback():
        head = {"num_cpus": 0, "include_dashboard": False, "node_ip_address": ADDRESS}
        nodes = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            with logical_gpus():
                nodes.add_node(node_ip_address=ADDRESS, num_cpus=4, num_gpus=1)
        running = Running(tmp_path, nodes.address, config, "logical")
        try:
            hosts = running.wait_for("after-0")
            running.finish()
        finally:
            running.end()
    finally:
        nodes.shutdown()
    # Three clients in a round on two GPUs: two actors on each, though its four CPUs and its memory have room for more.
    assert Counter(Counter(host["gpu"] for host in hosts).values()) == {2: 2}
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "shared"))
    log = running.log.read_text()
    assert "plan: 3 nodes, 2 GPUs: 4 actors, up to 2 on a GPU, 1 of a round's clients each" in log
    assert log.count("measured on GPU 0 of node ") == 2
    assert "could not be measured" not in log
