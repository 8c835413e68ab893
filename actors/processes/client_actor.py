"""A host as a Ray actor."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from actors.hosting.building import build_host, pin_threads
from actors.hosting.job import Job, JobResult
from actors.hosting.running_clients import Report
from actors.hosting.state import Change
from actors.hosting.sums import LEAST_BYTES, PartialSums, SumRange
from actors.processes.gpus import Gpu
from actors.processes.shared_memory import Parcel
from actors.processes.transport import ActorEnd, Reply
from algorithms.registry import Experiment
from rayfl.diagnosis.tracebacks import complete
from rayfl.errors import RayflError
from rayfl.params import Tree
from rayfl.storage.manifest import StoredFile
from rayfl.tracking.environment import device_name


def host_name(host: int) -> str:
    """Returns a host's name in Ray's logs and dashboard."""
    return f"rayfl-host-{host:02d}"


class ClientActor:
    """A :class:`ClientHost` in a process of its own.

    Training runs in one thread; commits and pings have another, so that writing overlaps the next round. A third says
    what the first is doing.

    Args:
        config: the configuration as plain data.
        host: the host's number.
        device: ``cpu`` or ``cuda``.
        neighbours: how many actors share the machine's memory, itself included.
        own_gpu: finds the GPU that this process sees; not called on the CPU.

    Raises:
        ResourceError: when it sees none, or several.
    """

    def __init__(
        self, config: dict[str, Any], host: int, device: str, neighbours: int, own_gpu: Callable[[], Gpu]
    ) -> None:
        self._number = host
        self._config = Experiment.knowing(config).model_validate(config)
        self._pinned = threading.local()
        self._pin()
        self._gpu = own_gpu() if device == "cuda" else None
        self._host = build_host(self._config, host, self._gpu.device if self._gpu else device, neighbours)
        # What is there now stays as long as the process: a full collection need not look at it again.
        gc.collect()
        gc.freeze()
        self._end = ActorEnd(self._config.cluster.shared_memory // neighbours)

    def __repr__(self) -> str:
        return host_name(self._number)

    def run(
        self, job: Job, broadcast: Tree | Parcel, *incoming: Mapping[int, Tree], freed: Sequence[int] | None = None
    ) -> JobResult | Reply:
        """See :meth:`ClientHost.run`.

        Args:
            job: see there.
            broadcast: see there.
            incoming: see there.
            freed: segments of earlier results that the driver no longer reads; None if it reads none of this process.
        """
        with self._in_charge():
            result: JobResult | Reply = self._end.answered(
                lambda tree: self._host.run(job, tree, *incoming), broadcast, freed
            )
            return result

    def run_apart(
        self, job: Job, broadcast: Tree | Parcel, *incoming: Mapping[int, Tree], freed: Sequence[int] | None = None
    ) -> tuple[JobResult | Reply, PartialSums | None]:
        """See :meth:`ClientHost.run_apart` and :meth:`run`: what finds room in shared memory is no second result."""
        least, apart = LEAST_BYTES if freed is None else max(LEAST_BYTES, self._end.room), list[PartialSums | None]()

        def work(tree: Tree) -> JobResult:
            result, sums = self._host.run_apart(job, tree, *incoming, least=least)
            apart.append(sums)
            return result

        with self._in_charge():
            answer: JobResult | Reply = self._end.answered(work, broadcast, freed)
            return answer, apart[0]

    def merged(self, round: int, procedure: str, *parts: PartialSums) -> tuple[JobResult, PartialSums]:
        """See :meth:`ClientHost.merged`."""
        with self._in_charge():
            return self._host.merged(round, procedure, *parts)

    def part(self, sums: PartialSums, stretch: SumRange | None) -> JobResult:
        """See :meth:`ClientHost.part`."""
        with self._in_charge():
            return self._host.part(sums, stretch)

    @contextmanager
    def _in_charge(self) -> Iterator[None]:
        """For calls that compute: in its body errors are given notes of what led to them."""
        self._pin()
        try:
            yield
        except RayflError as error:
            # What an error came from stays behind when it leaves a process; notes go with it.
            error.add_note(f"In {host_name(self._number)}:\n{complete(error)}")
            raise

    @ray.method(concurrency_group="io")
    def handshake(self, greeting: Parcel) -> Parcel | None:
        """Returns the same message, if the driver's parcels can be opened here."""
        return self._end.handshake(greeting)

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
        self._end.reset()

    def held_states(self) -> dict[int, Tree]:
        """See :meth:`ClientHost.held_states`."""
        return self._host.held_states()

    @ray.method(concurrency_group="report")
    def doing(self) -> Report:
        """Returns which clients' code runs just now, and for how long."""
        return self._host.running.report()

    @ray.method(concurrency_group="io")
    def commit(self, rounds_completed: int) -> list[tuple[StoredFile, dict[int, Change]]]:
        """See :meth:`ClientHost.commit`."""
        return self._host.commit(rounds_completed)

    @ray.method(concurrency_group="io")
    def describe(self) -> dict[str, Any]:
        """Returns where the actor runs, and whether it trains looped or vectorised, how many clients at a time."""
        engine = self._host.engine
        return {
            "host": self._number,
            "node": socket.gethostname(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "gpu": self._gpu.uuid if self._gpu else "",
            "pid": os.getpid(),
            "device": str(engine.device),
            "device_name": device_name(engine.device),
            "vectorized": engine.vectorized,
            "width": engine.width,
            "note": engine.note,
        }


RemoteClientActor: Any = ray.remote(concurrency_groups={"io": 1, "report": 1})(ClientActor)  # type: ignore[call-overload]
