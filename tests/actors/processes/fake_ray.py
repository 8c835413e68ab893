"""A cluster without Ray: what a pool asks of Ray is answered from objects of this process, on a clock of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError

from actors.processes import placement, ray_pool
from actors.processes.placement import ActorOptions
from actors.processes.ray_pool import RayPool
from actors.processes.versions import versions


class FakeActor:
    """An actor.

    Args:
        cluster: where it is.
        number: number of its host.
        fate: how it starts: ``lives``, ``dies`` or ``waits`` for room.

    Attributes:
        silent: methods that do not answer.
    """

    def __init__(self, cluster: FakeCluster, number: int, fate: str) -> None:
        self._cluster = cluster
        self.number = number
        self.fate = fate
        self.silent: set[str] = set()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *_, **__: FakeHandle(self, method))

    def answer(self, method: str) -> Any:
        if self.fate == "dies":
            raise ActorDiedError
        return self._cluster.description(self.number) if method == "describe" else None


@dataclass(eq=False)
class FakeHandle:
    """A call of an actor."""

    actor: FakeActor
    method: str

    @property
    def ready(self) -> bool:
        waits = self.actor.fate == "waits" or self.method in self.actor.silent
        return self.actor.fate == "dies" or not waits


@dataclass
class FakeCluster:
    """A cluster.

    Attributes:
        cpus: CPUs of each node.
        taken: CPUs that others use, by node.
        fates: how the next actors start, see :class:`FakeActor`; those after them live.
        described: what actors say of themselves beside what they always do.
        dead: nodes that were there.
        actors: all that were started.
        now: seconds on the clock.
    """

    cpus: dict[str, float]
    taken: dict[str, float] = field(default_factory=dict)
    fates: list[str] = field(default_factory=list)
    described: dict[str, Any] = field(default_factory=dict)
    dead: tuple[str, ...] = ()
    actors: list[FakeActor] = field(default_factory=list)
    now: float = 0.0

    def options(self, **_: Any) -> Any:
        return SimpleNamespace(remote=self._start)

    def _start(self, config: Any, number: int, *_: Any) -> FakeActor:
        self.actors.append(FakeActor(self, number, self.fates.pop(0) if self.fates else "lives"))
        return self.actors[-1]

    def description(self, host: int) -> dict[str, Any]:
        return {"host": host, "node": "x", "node_id": "x", "versions": versions(), **self.described}

    def nodes(self) -> list[dict[str, Any]]:
        gone = [{"NodeID": node, "Alive": False, "Resources": {}} for node in self.dead]
        return gone + [{"NodeID": node, "Alive": True, "Resources": {"CPU": cpus}} for node, cpus in self.cpus.items()]

    def free(self) -> dict[str, dict[str, float]]:
        return {node: {"CPU": cpus - self.taken.get(node, 0.0)} for node, cpus in self.cpus.items()}

    def wait(
        self, handles: Sequence[FakeHandle], *, num_returns: int = 1, timeout: float | None = None, **_: Any
    ) -> tuple[list[FakeHandle], list[FakeHandle]]:
        ready = [handle for handle in handles if handle.ready]
        if len(ready) < num_returns:
            assert timeout is not None, "it would wait for ever"
            self.now += timeout
        return ready, [handle for handle in handles if handle not in ready]

    def get(self, handle: FakeHandle, timeout: float | None = None) -> Any:
        if not handle.ready:
            assert timeout is not None, "it would wait for ever"
            self.now += timeout
            raise GetTimeoutError
        return handle.actor.answer(handle.method)

    def kill(self, actor: FakeActor) -> None:
        actor.fate = "dies"

    def pool(self, count: int, at_least: int = 1, at_most: int = 9, begins_with: int | None = None) -> RayPool:
        """A pool of actors with one CPU each, which have 300 s to start."""
        options = ActorOptions(count, 1.0, 0.0, "cpu", 300.0, 0, at_least, at_most, begins_with=begins_with)
        return RayPool({}, options, "run")

    def living(self) -> Iterable[FakeActor]:
        return [actor for actor in self.actors if actor.fate == "lives"]


def in_place_of_ray(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Has pools use a cluster."""
    for name in ("nodes", "wait", "get", "kill"):
        monkeypatch.setattr(ray, name, getattr(cluster, name))
    here = SimpleNamespace(get_node_id=lambda: "driver")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(ray, "available_resources", dict)
    monkeypatch.setattr(placement, "state", SimpleNamespace(available_resources_per_node=cluster.free))
    monkeypatch.setattr(ray_pool, "RemoteClientActor", cluster)
    monkeypatch.setattr(ray_pool, "get_current_placement_group", lambda: None)
    monkeypatch.setattr(ray_pool, "time", SimpleNamespace(monotonic=lambda: cluster.now))
    return cluster
