"""Hosts as Ray actors, pinned to a fraction of a GPU."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from actors.building import build_host, pin_threads
from actors.host import Job, JobResult
from actors.pool import HostDiedError
from actors.state import Change
from algorithms.registry import Experiment
from rayfl.commits import StoredFile
from rayfl.errors import RayflError, ResourceError
from rayfl.params import Tree

_PING_TIMEOUT_S = 60.0


class ClientActor:
    """A :class:`ClientHost` in a process of its own.

    Training runs in one thread; commits and pings have another, so that writing overlaps the next round.

    Args:
        config: the configuration as plain data.
        host: the host's number.
        device: ``cpu`` or ``cuda``.
        neighbours: how many actors share the machine's memory, itself included.
    """

    def __init__(self, config: dict[str, Any], host: int, device: str, neighbours: int) -> None:
        self._number = host
        self._config = Experiment.knowing(config).model_validate(config)
        self._pinned = threading.local()
        self._pin()
        self._host = build_host(self._config, host, device, neighbours)

    def __repr__(self) -> str:
        return f"rayfl-host-{self._number:02d}"

    def run(self, job: Job, broadcast: Tree, *incoming: Mapping[int, Tree]) -> JobResult:
        """See :meth:`ClientHost.run`."""
        self._pin()
        return self._host.run(job, broadcast, *incoming)

    def _pin(self) -> None:
        """The number of OpenMP threads belongs to the calling thread, which need not be the constructor's."""
        if not getattr(self._pinned, "done", False):
            pin_threads(self._config.cluster.threads_per_actor)
            self._pinned.done = True

    def release(self, clients: Sequence[int]) -> dict[int, Tree]:
        """See :meth:`ClientHost.release`."""
        return self._host.release(clients)

    def rewind(self) -> None:
        """See :meth:`ClientHost.rewind`."""
        self._host.rewind()

    def held_states(self) -> dict[int, Tree]:
        """See :meth:`ClientHost.held_states`."""
        return self._host.held_states()

    @ray.method(concurrency_group="io")
    def commit(self, rounds_completed: int) -> tuple[StoredFile, dict[int, Change]] | None:
        """See :meth:`ClientHost.commit`."""
        return self._host.commit(rounds_completed)

    @ray.method(concurrency_group="io")
    def describe(self) -> dict[str, Any]:
        """Where the actor runs, and whether it trains looped or vectorised."""
        engine = self._host.engine
        return {
            "host": self._number,
            "node": socket.gethostname(),
            "pid": os.getpid(),
            "device": str(engine.device),
            "vectorized": engine.vectorized,
            "note": engine.note,
        }


_RemoteClientActor: Any = ray.remote(concurrency_groups={"io": 1})(ClientActor)  # type: ignore[call-overload]


@dataclass(frozen=True)
class ActorOptions:
    """What Ray reserves for each actor.

    Attributes:
        count: number of actors.
        num_cpus: CPUs each.
        num_gpus: GPU share each, 1/k.
        device: ``cpu`` or ``cuda``.
        timeout_s: how long all of them may take to start.
    """

    count: int
    num_cpus: float
    num_gpus: float
    device: str
    timeout_s: float


class RayPool:
    """Hosts as Ray actors.

    Args:
        config: the configuration as plain data.
        options: how many actors with what resources.

    Raises:
        ResourceError: when the actors do not start in time.
    """

    def __init__(self, config: dict[str, Any], options: ActorOptions) -> None:
        self._config = config
        self._options = options
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        self._neighbours = math.ceil(options.count / max(sum(bool(node["Alive"]) for node in nodes), 1))
        self._actors = [self._start(host) for host in range(options.count)]
        try:
            self.descriptions: list[dict[str, Any]] = self._describe(range(options.count))
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return len(self._actors)

    def put(self, tree: Tree) -> Any:
        return ray.put(tree)

    def submit(self, host: int, method: str, *args: Any) -> Any:
        return getattr(self._actors[host], method).remote(*args)

    def collect(self, handles: Mapping[Any, int]) -> Iterator[tuple[int, Any]]:
        waiting = list(handles)
        while waiting:
            ready, waiting = ray.wait(waiting, num_returns=1)
            yield handles[ready[0]], _result(ready[0], handles[ready[0]])

    def revive(self) -> list[int]:
        dead = []
        pings = [actor.describe.remote() for actor in self._actors]
        for host, ping in enumerate(pings):
            try:
                ray.get(ping, timeout=_PING_TIMEOUT_S)
            except (RayError, GetTimeoutError):
                # One that hangs is as good as dead, and must not wake up later and write.
                ray.kill(self._actors[host])
                dead.append(host)
        for host in dead:
            self._actors[host] = self._start(host)
        for description in self._describe(dead):
            self.descriptions[description["host"]] = description
        return dead

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    def _start(self, host: int) -> Any:
        options = self._options
        actor = _RemoteClientActor.options(num_cpus=options.num_cpus, num_gpus=options.num_gpus)
        return actor.remote(self._config, host, options.device, self._neighbours)

    def _describe(self, hosts: Sequence[int]) -> list[dict[str, Any]]:
        pings = [self._actors[host].describe.remote() for host in hosts]
        missing = ray.wait(pings, num_returns=len(pings), timeout=self._options.timeout_s)[1] if pings else []
        if missing:
            options = self._options
            raise ResourceError(
                f"{len(missing)} of {len(pings)} actors did not start within {options.timeout_s:g} s: each needs "
                f"{options.num_cpus:g} CPUs and {options.num_gpus:g} GPUs, the cluster has "
                f"{_available()} free; lower cluster.num_actors or cluster.cpus_per_actor"
            )
        return [_result(ping, host) for host, ping in zip(hosts, pings, strict=True)]


def _available() -> str:
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"


def _result(handle: Any, host: int) -> Any:
    """A call's result; Ray's wrappers are taken off, what means a lost process becomes HostDiedError."""
    try:
        return ray.get(handle)
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RayflError):
            raise cause from None
        if isinstance(cause, RayError):
            raise HostDiedError(host, f"{type(cause).__name__}: {_first_line(cause)}") from None
        raise
    except RayActorError as error:
        if "The actor died because of an error raised in its creation task" in str(error):
            raise ResourceError(f"host {host} could not be set up: {_last_line(error)}") from None
        raise HostDiedError(host, f"{type(error).__name__}: {_first_line(error)}") from None
    except RayError as error:
        raise HostDiedError(host, f"{type(error).__name__}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[-1]
