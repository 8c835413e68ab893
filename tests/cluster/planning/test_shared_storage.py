"""A folder that is not the same place on every node is found before a run starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.planning import shared_storage
from cluster.planning.shared_storage import (
    FIRST_WAIT_S,
    SharedFolder,
    all_ready,
    check_shared_storage,
    visit_storage,
)
from rayfl.errors import ResourceError
from rayfl.storage.files import Storage

ROOT = Path(__file__).parents[3]

# Two nodes on the loopback interface, whose home folders differ: `~/own` is another place on each of them.
SCRIPT = """
import os, sys
from unittest import mock
import ray
from ray.cluster_utils import Cluster
from cluster.rounds.session import loopback
from cluster.planning.shared_storage import check_shared_storage
from rayfl.errors import ResourceError
from rayfl.storage.files import Storage

first, second = sys.argv[1:]
with loopback():
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.add_node(num_cpus=1, env_vars={"HOME": second})
    ray.init(cluster.address, log_to_driver=False)
for folder in ("~/shared", "~/own"):
    try:
        check_shared_storage(Storage(folder), 60)
        print(folder, "ok")
    except ResourceError as error:
        print(folder, error)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_every_node_is_asked_also_one_without_cpus(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for home in (first, second):
        (home / "own").mkdir(parents=True)
    (first / "shared").mkdir()
    (second / "shared").symlink_to(first / "shared")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(first), str(second)],
        env=environment | {"HOME": str(first), "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shared, own = [line for line in done.stdout.splitlines() if line.startswith("~/")]
    assert shared == "~/shared ok"
    assert "~/own" in own and "does not see it" in own
    assert own.count("node ") == 1  # the other one, not the driver's
    assert not list(tmp_path.rglob(".probe-*"))


def test_a_node_that_reads_something_else(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    storage.write("probe", b"of another cluster")
    assert "something else" in visit_storage(str(tmp_path), "probe", "answer")
    storage.write("probe", b"probe")
    assert visit_storage(str(tmp_path), "probe", "answer") == ""
    assert storage.exists("answer")
    assert "cannot write" in visit_storage(str(tmp_path), "probe", "probe/answer")


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_a_node_that_leaves_meanwhile_needs_no_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [node] = [node for node in ray.nodes() if node["Alive"]]
    leaving = node | {"NodeID": "5" * len(node["NodeID"])}
    answers = iter([[node, leaving], [node, leaving | {"Alive": False}]])
    monkeypatch.setattr(ray, "nodes", lambda: next(answers))
    check_shared_storage(Storage(str(tmp_path)), 60)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_a_single_node_shares_with_nobody(tmp_path: Path) -> None:
    check_shared_storage(Storage(str(tmp_path)), 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("local_ray")
def test_nodes_that_have_joined_are_asked_once_and_waited_for_shortly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [node] = [node for node in ray.nodes() if node["Alive"]]
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "the driver's"))
    place, late = SharedFolder(Storage(str(tmp_path)), 60), list[bool]()
    wait, waited = ray.wait, list[float]()

    def slow(tasks: list[Any], **options: Any) -> Any:
        waited.append(options["timeout"])
        return ([], tasks) if late else wait(tasks, **options | {"timeout": 60})

    monkeypatch.setattr(ray, "wait", slow)
    late.append(True)
    assert not place.ready() and not place.ready()
    assert waited == pytest.approx([FIRST_WAIT_S, 0.0], abs=1.0)
    assert len(list(tmp_path.glob(".probe-*"))) == 1  # one question, however often its answer is looked for
    late.clear()
    assert place.ready() and not list(tmp_path.iterdir())
    monkeypatch.setattr(ray, "wait", lambda *_, **__: pytest.fail("it has shown that it sees the folder"))
    assert place.ready()
    joined = node | {"NodeID": "5" * len(node["NodeID"])}
    monkeypatch.setattr(ray, "nodes", lambda: [node, joined])
    monkeypatch.setattr(ray, "wait", lambda tasks, **_: ([], tasks))
    assert not place.ready()
    place.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("local_ray")
def test_two_folders_are_waited_for_as_long_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "the driver's"))
    folders, seconds, waited = [tmp_path / "runs", tmp_path / "copies"], [100.0], list[float]()
    places = [SharedFolder(Storage(str(folder)), 60) for folder in folders]

    def silent(tasks: list[Any], **options: Any) -> Any:
        assert all(list(folder.glob(".probe-*")) for folder in folders)  # both were asked about before
        waited.append(options["timeout"])
        seconds[0] += options["timeout"]
        return [], tasks

    monkeypatch.setattr(ray, "wait", silent)
    monkeypatch.setattr(shared_storage, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    assert not all_ready(places) and not all_ready(places)
    assert waited == [FIRST_WAIT_S, 0.0]
    for place in places:
        place.close()


@pytest.mark.usefixtures("local_ray")
def test_nodes_that_the_run_does_not_use_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [node] = [node for node in ray.nodes() if node["Alive"]]
    nodes = [
        node | {"Labels": {"kind": "driver"}},
        node | {"Labels": {"kind": "other"}, "NodeID": "5" * len(node["NodeID"]), "NodeManagerHostname": "not-there"},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    check_shared_storage(Storage(str(tmp_path)), 60, labels={"kind": "driver"})
    for labels in ({"kind": "other"}, {}, None):  # a single node is asked if it is not the driver's
        with pytest.raises(
            ResourceError,
            match=r"storage_path must be one place.*which is not known of .*node not-there .*could not be asked",
        ):
            check_shared_storage(Storage(str(tmp_path)), 60, labels=labels)
    assert not list(tmp_path.iterdir())
