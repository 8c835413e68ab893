"""A run that waits for room tells Ray's autoscaler what is missing."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ray.util.placement_group import placement_group_table

from actors.processes.placement import ActorOptions
from cluster.planning.autoscaling import AutoscalerRequest, demand
from cluster.planning.resources import plan_actors, wait_for_room
from cluster.rounds.session import ray_session
from rayfl.config.cluster_section import ClusterConfig
from rayfl.errors import ResourceError

PORT = 6379
"""Where the nodes of Ray's stand-in for a cloud look for their head."""


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
        ({"num_actors": 5, "device": "cuda", "actors_per_gpu": "auto"}, {}, [{"GPU": 1.0, "CPU": 1.0}] * 5),
        ({"clients_per_actor": 1, "device": "cuda", "cpus_per_actor": 1}, {}, [{"GPU": 1.0, "CPU": 20.0}]),
        ({"num_actors": 2, "device": "cuda", "cpus_per_actor": 0}, {}, [{"GPU": 1.0}] * 2),
    ],
)  # fmt: skip
def test_what_is_asked_for(options: dict[str, Any], present: dict[str, float], expected: list[Any]) -> None:
    assert demand(ClusterConfig.model_validate(options), present, 20) == expected


def test_nothing_is_asked_for_without_waiting() -> None:
    asked: list[bool] = []

    def planned(wanted: ClusterConfig) -> ActorOptions:
        return plan_actors(wanted, {"CPU": 2}, 20)

    with pytest.raises(ResourceError):
        wait_for_room(ClusterConfig(num_actors=4), planned, ask=lambda: asked.append(True))
    assert not asked
    config = ClusterConfig.model_validate({"num_actors": 4, "resources_timeout_s": 4})
    with pytest.raises(ResourceError):
        wait_for_room(config, planned, lambda _: None, ask=lambda: asked.append(True))
    assert asked


@pytest.mark.slow
def test_what_is_missing_waits_where_an_autoscaler_sees_it() -> None:
    """Ray counts placement groups that wait for their place as demand."""
    config = ClusterConfig.model_validate({"num_actors": 3})
    with ray_session(None):
        with AutoscalerRequest("rayfl-test-waits") as wish:
            for _ in range(2):
                wish.ask([*demand(config, {"CPU": 0}, 20), {"CPU": 1000.0}])
            (group,) = [one for one in placement_group_table().values() if one["name"] == "rayfl-test-waits"]
            assert group["state"] == "PENDING"
            assert sorted(bundle["CPU"] for bundle in group["bundles"].values()) == [1.0, 1.0, 1.0, 1000.0]
        groups = [one for one in placement_group_table().values() if one["name"] == "rayfl-test-waits"]
        assert [one["state"] for one in groups] == ["REMOVED"]


def children(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """A process and all that it has started."""
    try:
        found = psutil.Process(process.pid)
        return [found, *found.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def address() -> Iterator[str]:
    """A head with one CPU, and an autoscaler whose cloud starts further nodes with one CPU on this machine."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", PORT)) == 0:
            pytest.skip(f"Ray's stand-in for a cloud needs port {PORT}, which is taken")
    folder = Path(tempfile.mkdtemp(prefix="rayfl-", dir="/tmp"))  # short: Ray's sockets are in there
    kinds = {"ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
             "worker": {"resources": {"CPU": 1}, "node_config": {}, "min_workers": 0, "max_workers": 2}}  # fmt: skip
    steps = [f"{part}setup_commands" for part in ("", "head_", "worker_")]
    empty = ("initialization_commands", *steps, "head_start_ray_commands", "worker_start_ray_commands",
             "cluster_synced_files", "rsync_exclude", "rsync_filter")  # fmt: skip
    config = {
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        **{key: [] for key in empty},
        "cluster_name": "fake",
        "max_workers": 2,
        "provider": {"type": "fake_multinode", "use_node_id_as_ip": True, "disable_node_updaters": True,
                     "disable_launch_config_check": True},
        "available_node_types": kinds,
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "file_mounts_sync_continuously": False,
    }  # fmt: skip
    (folder / "autoscaling.yaml").write_text(yaml.safe_dump(config))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # stays on the loopback interface
    }
    command = [Path(sys.executable).parent / "ray", "start", "--head", "--block", f"--port={PORT}", "--num-cpus=1",
               "--include-dashboard=false", f"--temp-dir={folder}", f"--autoscaling-config={folder}/autoscaling.yaml",
               "--disable-usage-stats"]  # fmt: skip
    with (folder / "log").open("wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield f"127.0.0.1:{PORT}"
    finally:
        for process in children(head):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_an_autoscaler_adds_the_nodes_a_run_needs(address: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rayfl", "run", "quickstart", "train.rounds=2", "cluster.num_actors=2",
               "cluster.resources_timeout_s=120", f"storage_path={tmp_path}", "name=run"]  # fmt: skip
    environment = os.environ | {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    deadline = time.monotonic() + 60
    while True:  # the head needs a moment
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode == 0 or (tmp_path / "run" / "rayfl.log").exists() or time.monotonic() > deadline:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "run" / "rayfl.log").read_text()
    assert "waiting for nodes: 2 actors" in log
    assert "plan: 2 nodes: 2 actors with 1 CPU each" in log
