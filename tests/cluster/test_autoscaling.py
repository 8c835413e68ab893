"""A run that waits for room tells Ray's autoscaler what is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import AutoscalingCluster

from cluster.autoscaling import demand
from cluster.resources import wait_for_room
from rayfl.config.schema import ClusterConfig
from rayfl.errors import ResourceError


@pytest.mark.parametrize(
    ("options", "present", "expected"),
    [
        ({"num_actors": 3}, {"CPU": 1}, [{"CPU": 1.0}] * 3),
        ({"num_actors": 3, "cpus_per_actor": 0.5}, {"CPU": 1}, [{"CPU": 0.5}] * 3),
        ({"num_actors": 3, "cpus_per_actor": 0}, {"CPU": 1}, []),
        ({}, {}, [{"CPU": 1.0}]),
        ({"clients_per_actor": 1}, {}, [{"CPU": 1.0}]),
        ({"clients_per_actor": 1, "cpus_per_actor": 2}, {}, [{"CPU": 2.0}] * 20),
        ({"num_actors": 3, "device": "cpu"}, {"GPU": 1}, [{"CPU": 1.0}] * 3),
        ({"num_actors": 3}, {"GPU": 1}, [{"GPU": 1.0, "CPU": 1.0}] * 3),
        ({"num_actors": 3, "device": "cuda"}, {}, [{"GPU": 1.0, "CPU": 1.0}] * 3),
        ({"num_actors": 5, "device": "cuda", "actors_per_gpu": 2}, {},
         [{"GPU": 1.0, "CPU": 2.0}, {"GPU": 1.0, "CPU": 2.0}, {"GPU": 1.0, "CPU": 1.0}]),
        ({"num_actors": 5, "device": "cuda", "actors_per_gpu": "auto"}, {}, [{"GPU": 1.0, "CPU": 5.0}]),
        ({"num_actors": 2, "device": "cuda", "cpus_per_actor": 0}, {}, [{"GPU": 1.0}] * 2),
    ],
)  # fmt: skip
def test_what_is_asked_for(options: dict[str, Any], present: dict[str, float], expected: list[Any]) -> None:
    assert demand(ClusterConfig.model_validate(options), present, 20) == expected


def test_nothing_is_asked_for_without_waiting() -> None:
    asked: list[bool] = []
    with pytest.raises(ResourceError):
        wait_for_room(ClusterConfig(num_actors=4), lambda: {"CPU": 2}, 20, ask=lambda: asked.append(True))
    assert not asked
    config = ClusterConfig.model_validate({"num_actors": 4, "resources_timeout_s": 4})
    with pytest.raises(ResourceError):
        wait_for_room(config, lambda: {"CPU": 2}, 20, lambda _: None, ask=lambda: asked.append(True))
    assert asked


@pytest.mark.slow
def test_an_autoscaler_adds_the_nodes_a_run_needs(tmp_path: Path) -> None:
    cluster = AutoscalingCluster(
        head_resources={"CPU": 1},
        worker_node_types={"worker": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 3}},
    )
    try:
        cluster.start()
        done = subprocess.run(
            [sys.executable, "-m", "rayfl", "run", "quickstart", "train.rounds=2", "cluster.num_actors=2",
             "cluster.resources_timeout_s=120", f"storage_path={tmp_path}", "name=run"],
            env={**os.environ, "RAY_ADDRESS": "auto"}, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    finally:
        cluster.shutdown()
    log = (tmp_path / "run" / "rayfl.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "waiting for nodes: 2 actors" in log
    assert "plan: 2 nodes: 2 actors with 1 CPU each" in log
