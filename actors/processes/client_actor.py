"""A host as a Ray actor."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch

from actors.hosting.building import build_host, pin_threads
from actors.hosting.job import Job, JobResult
from actors.hosting.memory import check_spill_dir
from actors.hosting.running_clients import Report
from actors.hosting.state import Change
from actors.hosting.sums import LEAST_BYTES, PartialSums, SumRange
from actors.processes.garbage import settle
from actors.processes.gpus import Gpu
from actors.processes.shared_memory import Parcel
from actors.processes.transport import ActorEnd, Reply
from actors.processes.versions import versions
from actors.processes.working_folder import work_in
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

    Training runs in one thread. Commits have another, so that writing overlaps the next round. A third reports what the
    first is doing, and answers pings: a commit may take minutes.

    Args:
        config: configuration as plain data.
        host: number of the host.
        device: ``cpu`` or ``cuda``.
        neighbours: number of actors that share the machine's memory, this one included.
        own_gpu: returns the GPU that this process sees; not called on the CPU.
        folder: working folder of the driver.
        content: SHA-256 of the samples that the driver has; None where it is not known.

    Raises:
        DataError: when this node has other samples.
        ResourceError: when the process sees no GPU, or several, or ``cluster.spill_dir`` cannot be written to.
    """

    def __init__(
        self,
        config: dict[str, Any],
        host: int,
        device: str,
        neighbours: int,
        own_gpu: Callable[[], Gpu],
        folder: str,
        content: str | None,
    ) -> None:
        work_in(folder)
        self._number = host
        self._config = Experiment.model_validate(config)
        self._pinned = threading.local()
        self._pin()
        check_spill_dir(self._config.cluster.spill_dir)
        self._gpu = own_gpu() if device == "cuda" else None
        on = self._gpu.device if self._gpu else device
        self._host = build_host(self._config, host, on, neighbours, content=content)
        settle()  # these objects live as long as the process
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
            freed: segments of earlier results that the driver no longer reads; None if it does not read this process's
                memory.
        """
        with self._errors_noted():
            result: JobResult | Reply = self._end.answered(
                lambda tree: self._host.run(job, tree, *incoming), broadcast, freed
            )
            return result

    def run_apart(
        self, job: Job, broadcast: Tree | Parcel, *incoming: Mapping[int, Tree], freed: Sequence[int] | None = None
    ) -> tuple[JobResult | Reply, PartialSums | None]:
        """See :meth:`ClientHost.run_apart`, :meth:`run`. Sums that fit into shared memory stay in the first result."""
        least, apart = LEAST_BYTES if freed is None else max(LEAST_BYTES, self._end.room), list[PartialSums | None]()

        def work(tree: Tree) -> JobResult:
            result, sums = self._host.run_apart(job, tree, *incoming, least=least)
            apart.append(sums)
            return result

        with self._errors_noted():
            answer: JobResult | Reply = self._end.answered(work, broadcast, freed)
            return answer, apart[0]

    def merged(self, round: int, procedure: str, *parts: PartialSums) -> tuple[JobResult, PartialSums]:
        """See :meth:`ClientHost.merged`."""
        with self._errors_noted():
            return self._host.merged(round, procedure, *parts)

    def part(self, sums: PartialSums, stretch: SumRange | None) -> JobResult:
        """See :meth:`ClientHost.part`."""
        with self._errors_noted():
            return self._host.part(sums, stretch)

    @contextmanager
    def _errors_noted(self) -> Iterator[None]:
        """Pins threads for a call that computes, and adds the traceback to errors as a note."""
        self._pin()
        try:
            yield
        except RayflError as error:
            # The cause of an error is lost when it is sent to another process; notes are kept.
            error.add_note(f"In {host_name(self._number)}:\n{complete(error)}")
            raise

    @ray.method(concurrency_group="io")
    def handshake(self, greeting: Parcel) -> Parcel | None:
        """Returns the driver's test message if this process can open the driver's shared memory."""
        return self._end.handshake(greeting)

    def _pin(self) -> None:
        """Sets the number of threads, which OpenMP keeps by calling thread."""
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
        """Returns which clients' code is running, and for how long."""
        return self._host.running.report()

    @ray.method(concurrency_group="report")
    def abandon(self) -> None:
        """See :meth:`ClientHost.abandon`."""
        self._host.abandon()

    @ray.method(concurrency_group="io")
    def commit(self, rounds_completed: int) -> list[tuple[StoredFile, dict[int, Change]]]:
        """See :meth:`ClientHost.commit`."""
        return self._host.commit(rounds_completed)

    @ray.method(concurrency_group="io")
    def describe(self) -> dict[str, Any]:
        """Returns where the actor runs and with which versions, and how it trains: looped or vectorised, and how many
        clients at a time."""
        engine = self._host.engine
        return {
            "host": self._number,
            "node": socket.gethostname(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "gpu": self._gpu.uuid if self._gpu else "",
            "pid": os.getpid(),
            "device": str(engine.device),
            "device_name": device_name(engine.device),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "versions": versions(),
            "vectorized": engine.vectorized,
            "width": engine.width,
            "note": engine.note,
        }


RemoteClientActor: Any = ray.remote(concurrency_groups={"io": 1, "report": 1})(ClientActor)  # type: ignore[call-overload]
