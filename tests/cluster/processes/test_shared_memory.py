"""Trees between the driver and actors of its machine go through shared memory, and no bit depends on it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

import rayfl
from actors.hosting.job import JobResult
from actors.processes.pool import HostDiedError
from actors.processes.ray_host import RayHost
from actors.processes.shared_memory import Inbox, Outbox, Parcel
from actors.processes.transport import Reply, Sender
from tests.cluster.rounds.test_recovery import ActorKiller, long_rounds
from tests.support.experiments import assert_same, outcome, small_experiment

WIDE = {"name": "two_nn", "hidden": [256, 128]}
"""200 kB: neither a broadcast nor a sum travels within a call."""


def wide_experiment(storage: Path, name: str, method: str, **cluster: Any) -> dict[str, Any]:
    config = small_experiment(storage, name, method, **cluster)
    candidates = {"candidates": [WIDE, WIDE | {"hidden": [256, 64]}]}
    return config | {"model": candidates if method == "fedme" else WIDE}


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the driver has put into the object store."""
    trees: list[Any] = []
    put = ray.put
    monkeypatch.setattr("actors.processes.transport.ray.put", lambda tree: trees.append(tree) or put(tree))
    return trees


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[JobResult]:
    """The results that the driver has read in shared memory."""
    results: list[JobResult] = []
    inner = Inbox.open

    def open_(self: Inbox, parcel: Parcel) -> Any:
        value = inner(self, parcel)
        if isinstance(value, JobResult):
            results.append(value)
        return value

    monkeypatch.setattr(Inbox, "open", open_)
    return results


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_large_trees_go_through_shared_memory_where_there_is_room(
    tmp_path: Path, stored: list[Any], opened: list[JobResult]
) -> None:
    rayfl.run(wide_experiment(tmp_path, "inline", "fedavg", backend="inline"))
    inline = outcome(tmp_path / "inline")
    for limit, through_the_store in (("256MiB", False), ("100KiB", True), (0, True)):
        stored.clear()
        opened.clear()
        cluster = {"num_actors": 1, "shared_memory": limit}
        rayfl.run(wide_experiment(tmp_path, "ray", "fedavg", **cluster))
        assert bool(stored) == through_the_store
        # Each of four rounds has a sum; evaluations have none.
        assert len(opened) == (0 if through_the_store else 4)
        assert_same(inline, outcome(tmp_path / "ray"))
        (tmp_path / "ray").rename(tmp_path / str(limit))


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("method", "limit"),
    [
        pytest.param(method, limit, marks=pytest.mark.slow)
        for method in ("scaffold", "fedme", "fedphp", "superfed-mm")
        for limit in ("256MiB", "3MiB")
    ],
)
def test_methods_have_the_bits_of_one_process(method: str, limit: str, tmp_path: Path) -> None:
    """With the lower limit some messages find no room and go the other way."""
    rayfl.run(wide_experiment(tmp_path, "inline", method, backend="inline"))
    rayfl.run(wide_experiment(tmp_path, "ray", method, num_actors=2, shared_memory=limit))
    assert_same(outcome(tmp_path / "inline"), outcome(tmp_path / "ray"))


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_a_run_survives_actors_that_die_between_messages(tmp_path: Path) -> None:
    rayfl.run(long_rounds(wide_experiment(tmp_path, "undisturbed", "superfed-mm", backend="inline")))
    killer = ActorKiller(after_round=1, delay_s=0.1)
    rayfl.run(long_rounds(wide_experiment(tmp_path, "killed", "superfed-mm", num_actors=2)), callbacks=[killer])
    assert killer.failures
    assert_same(outcome(tmp_path / "undisturbed"), outcome(tmp_path / "killed"))


class Keeper:
    """An actor that goes on referring to what it was given."""

    def __init__(self) -> None:
        self._inbox, self._outbox, self._kept = Inbox(), Outbox(64 << 20), []

    def describe(self) -> dict[str, Any]:
        return {"node_id": ray.get_runtime_context().get_node_id()}

    def handshake(self, greeting: Parcel) -> Parcel | None:
        return self._outbox.pack(np.array(self._inbox.open(greeting)), least=1)

    def run(self, broadcast: Parcel, keep: bool, seconds: float, freed: Any) -> Any:
        time.sleep(seconds)
        self._inbox.freed()
        tree = self._inbox.open(broadcast)
        if keep:
            self._kept.append(tree)
        value = float(tree["w"].sum())
        del tree
        return Reply(value, broadcast.serial in self._inbox.freed())

    def kept(self) -> list[float]:
        return [float(tree["w"][0]) for tree in self._kept]


def tree(fill: float) -> Mapping[str, np.ndarray]:
    return {"w": np.full(100_000, fill, np.float32)}


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_memory_that_an_actor_still_reads_is_never_written_again() -> None:
    sender = Sender(64 << 20)
    hosts = [RayHost(number, ray.remote(Keeper).options(num_cpus=1).remote()) for number in range(2)]
    for position, host in enumerate(hosts):
        host.finish_start(position, sender)

    def spread(fill: float, keep: bool, delays: tuple[float, float] = (0, 0)) -> list[float]:
        broadcast = sender.put(dict(tree(fill)))
        handles = [host.submit("run", broadcast, keep, delay) for host, delay in zip(hosts, delays, strict=True)]
        del broadcast
        return [host.result(handle, 0) for host, handle in zip(hosts, handles, strict=True)]

    try:
        # The second one opens it long after the first one has said that it goes on reading.
        assert spread(1, keep=True, delays=(0, 0.5)) == [100_000, 100_000]
        for fill in range(2, 8):
            assert spread(fill, keep=fill % 2 == 0) == [100_000 * fill] * 2
        for host in hosts:
            assert ray.get(host.actor.kept.remote()) == [1, 2, 4, 6]
        # Calls that nobody waits for keep their memory too.
        forgotten = sender.put(dict(tree(9)))
        late = hosts[0].submit("run", forgotten, False, 0.5)
        hosts[0].forget()
        spread(10, keep=False)
        assert ray.get(late).value == 900_000
        del forgotten
    finally:
        for host in hosts:
            ray.kill(host.actor)


def test_an_actor_that_has_answered_and_died_before_its_answer_was_read_counts_as_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = RayHost(0, SimpleNamespace(describe=SimpleNamespace(remote=lambda: None)))
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    answer = Reply(Parcel(process.pid, 3, 1, 1 << 20, b"", ()), True)
    monkeypatch.setattr("actors.processes.ray_host.result_of", lambda handle, position: answer)
    with pytest.raises(HostDiedError, match="host 4 died: its answer cannot be read any more"):
        host.result("handle", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_no_descriptor_is_left_after_a_run(tmp_path: Path) -> None:
    def segments() -> int:
        return sum(
            "memfd:rayfl" in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()
        )

    seen: list[int] = []

    class Watch(rayfl.Callback):
        def on_round(self, rounds_completed: int, cohort: Any, seconds: float) -> None:
            seen.append(segments())

    rayfl.run(wide_experiment(tmp_path, "ray", "fedavg", num_actors=2), callbacks=[Watch()])
    assert max(seen) > 0
    assert seen[-1] == seen[-2]
    assert segments() == 0
