"""How rayfl meets Ray: bound to loopback on its own, a guest on a cluster that is there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

import rayfl
from cluster.rounds.session import ray_session, start_local
from rayfl.errors import ResourceError
from tests.support.experiments import assert_same, outcome, small_experiment


def listening_addresses() -> set[str]:
    """Addresses on which this process and its children accept connections."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = set()
    for process in family:
        for connection in process.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.add(connection.laddr.ip)
    return found


@pytest.mark.slow
def test_a_local_ray_listens_on_the_loopback_interface_only_and_ends_with_the_run() -> None:
    script = (
        "from cluster.rounds.session import ray_session; import ray, time\n"
        "from tests.cluster.rounds.test_session import listening_addresses\n"
        "with ray_session(None):\n"
        "    ray.get(ray.remote(lambda: 1).remote())\n"
        "    print(sorted(listening_addresses()))\n"
        "assert not ray.is_initialized()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    addresses = eval(done.stdout.strip().splitlines()[-1])
    assert addresses
    assert set(addresses) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize("user", [None, "100"])
def test_a_local_ray_frees_objects_at_once_unless_the_user_wants_otherwise(user: str | None) -> None:
    """The next object then lies where the last one was, in memory that processes know already."""
    script = (
        "from cluster.rounds.session import ray_session; import numpy as np, os, ray, time\n"
        "def address():\n"
        "    return ray.get(ray.put(np.zeros(500_000))).__array_interface__['data'][0]\n"
        "before = dict(os.environ)\n"
        "with ray_session(None):\n"
        "    found = []\n"
        "    for _ in range(6):\n"
        "        found.append(address())\n"
        "        time.sleep(0.1)\n"
        "assert 'RAY_free_objects_batch_size' in before or 'RAY_free_objects_batch_size' not in os.environ\n"
        "print(len(set(found)))\n"
    )
    others = {"RAY_ADDRESS", "RAY_free_objects_batch_size"}
    environment = {name: value for name, value in os.environ.items() if name not in others}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        env=environment | ({} if user is None else {"RAY_free_objects_batch_size": user}),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (int(done.stdout) <= 2) == (user is None)


def test_no_cluster_at_an_address_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    for wrong in (address, "127.0.0.1:port", "ray://127.0.0.1:10001"):
        with pytest.raises(ResourceError, match=wrong), ray_session(wrong):
            pass
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ResourceError, match=address), ray_session(None):
        pass


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_a_connection_that_exists_is_used_and_left_alone(tmp_path: Path) -> None:
    with ray_session(None):
        assert ray.is_initialized()
    assert ray.is_initialized()
    rayfl.run(small_experiment(tmp_path, "guest", "fedavg", num_actors=1))
    assert ray.is_initialized()


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_an_existing_cluster_is_attached_to_and_never_stopped(tmp_path: Path) -> None:
    rayfl.run(small_experiment(tmp_path, "calm", "fedavg", backend="inline"))
    address = ray.get_runtime_context().gcs_address
    script = f"import rayfl; rayfl.run({small_experiment(tmp_path, 'attached', 'fedavg', num_actors=2)!r})"
    subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert ray.get(ray.remote(lambda: "alive").remote()) == "alive"
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "attached"))


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_relative_storage_path_is_that_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray was started in another folder: what actors write would lie there."""
    monkeypatch.chdir(tmp_path)
    rayfl.run(small_experiment(Path("runs"), "calm", "ditto", backend="inline"))
    storage = {"copies": 2, "copies_path": "copies"}
    result = rayfl.run(small_experiment(Path("runs"), "near", "ditto", num_actors=1) | {"storage": storage})
    assert result.path == str(tmp_path / "runs" / "near")
    assert_same(outcome(tmp_path / "runs" / "calm"), outcome(tmp_path / "runs" / "near"))
    written = sorted(file.name for file in (tmp_path / "runs" / "near" / "commits").iterdir())
    assert written == sorted(file.name for file in (tmp_path / "copies" / "near" / "commits").iterdir())


@pytest.mark.usefixtures("local_ray")
def test_files_of_relative_paths_are_found_by_actors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = (f"site{row % 2},{row % 5},{row % 3}" for row in range(60))
    Path("rows.csv").write_text("\n".join(["site,x,y", *rows]))
    mine = {
        "dataset": {"name": "parquet", "path": "rows.csv", "client": "site", "x": ["x"], "y": "y"},
        "partition": "natural",
        "model": "tabular_mlp",
    }
    cohort = {"train": {"rounds": 1, "clients_per_round": "all"}, "evaluation": {"every": 1}}
    result = rayfl.run(small_experiment(tmp_path, "near", "fedavg", num_actors=1) | mine | cohort)
    assert result.rounds_completed == 1


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_actors_that_end_while_they_start_are_no_defect_of_rayfl(tmp_path: Path) -> None:
    model = {"model": {"name": "tests.support.fatal_model:fatal", "head": "4"}}
    with pytest.raises(ResourceError, match="an actor ended while it started"):
        rayfl.run(small_experiment(tmp_path, "fatal", "fedavg", num_actors=2) | model)


@pytest.mark.usefixtures("local_ray")
def test_actors_that_do_not_fit_are_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"9 actors with 1 CPUs.*the cluster has 8 CPUs"):
        rayfl.run(small_experiment(tmp_path, "large", "fedavg", num_actors=9))


@pytest.mark.slow
def test_a_ray_that_does_not_come_up_is_no_defect_of_rayfl(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine under load Ray's node times out, with a plain Exception."""

    def slow(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", slow)
    with pytest.raises(ResourceError, match=r"Ray did not start on this machine \(The current node.*backend=inline"):
        start_local()
