"""Hosts as Ray actors, pinned to a fraction of a GPU."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from actors.building import build_host, pin_threads
from actors.job import Job, JobResult
from actors.pool import HostDiedError
from actors.state import Change
from algorithms.registry import Experiment
from rayfl.commits import StoredFile
from rayfl.errors import RayflError, ResourceError
from rayfl.params import Tree

_PING_TIMEOUT_S = 60.0


def host_name(host: int) -> str:
    """What a host is called in Ray's logs and dashboard."""
    return f"rayfl-host-{host:02d}"


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
        return host_name(self._number)

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
        run: the run's name. Its actors are ``rayfl-host-00``, ... in a namespace of their own, so that runs share a
            cluster; the second life of one that died is ``rayfl-host-00-life-2``.

    Raises:
        ResourceError: when the actors do not start in time.
    """

    def __init__(self, config: dict[str, Any], options: ActorOptions, run: str) -> None:
        self._config = config
        self._options = options
        self.namespace = f"rayfl-{run}-{uuid.uuid4().hex[:8]}"
        self._lives: Counter[int] = Counter()
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

    def collect(self, handles: Mapping[Any, int], deadline_s: float | None = None) -> Iterator[tuple[int, Any]]:
        waiting = list(handles)
        heard = dict.fromkeys(handles.values(), time.monotonic())
        while waiting:
            timeout = None
            if deadline_s is not None:
                silent = min({handles[handle] for handle in waiting}, key=heard.__getitem__)
                timeout = max(heard[silent] + deadline_s - time.monotonic(), 0.0)
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
            if (
                not ready
                and ray.wait(
                    [handle for handle in waiting if handles[handle] == silent],
                    num_returns=1,
                    timeout=1,
                    fetch_local=False,
                )[0]
            ):
                heard[silent] = time.monotonic()  # the answer is there, and only on its way
                continue
            if not ready:
                # Its pings are answered by another thread: only its end makes sure that it does not go on.
                ray.kill(self._actors[silent])
                raise HostDiedError(silent, f"no answer within clients.deadline_s={deadline_s:g} s")
            host = handles[ready[0]]
            heard[host] = time.monotonic()
            yield host, _result(ready[0], host)

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
        self._lives[host] += 1
        life = f"-life-{self._lives[host]}" if self._lives[host] > 1 else ""
        actor = _RemoteClientActor.options(
            name=host_name(host) + life,
            namespace=self.namespace,
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
        )
        return actor.remote(self._config, host, options.device, self._neighbours)

    def _describe(self, hosts: Sequence[int]) -> list[dict[str, Any]]:
        pings = [self._actors[host].describe.remote() for host in hosts]
        missing = ray.wait(pings, num_returns=len(pings), timeout=self._options.timeout_s)[1] if pings else []
        if missing:
            options = self._options
            count = len(missing)
            raise ResourceError(
                f"{count} of {len(pings)} actors did not start within {options.timeout_s:g} s: each needs "
                f"{options.num_cpus:g} CPUs and {options.num_gpus:g} GPUs, {count * options.num_cpus:g} CPUs and "
                f"{count * options.num_gpus:g} GPUs together, the cluster has {_available()} free (others may hold "
                "the rest: `ray status`); lower cluster.num_actors or cluster.cpus_per_actor, or raise "
                "cluster.startup_timeout_s and wait"
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
