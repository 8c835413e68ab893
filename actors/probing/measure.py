"""Measures what one client costs: some local steps, timed and metered before the run's actors start.

The steps are those of the method itself, in a host of their own whose states nobody keeps. Random numbers are functions
of seed, round and client, so nothing that comes later changes by this.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from actors.hosting.building import automatic_data_memory
from actors.hosting.host import ClientHost
from actors.hosting.job import Job
from actors.probing.memory import DeviceMemory
from actors.probing.probe_calls import ProbeCall
from algorithms.fedavg import FedAvg
from rayfl.aggregation.exact_sum import MAX_WAITING_BYTES
from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.updates.requests import Request, TrainRequest
from rayfl.errors import DeviceLostError, ResourceError

_TIMED_STEPS = 4
_FEW_STEPS = 2


@dataclass(frozen=True)
class Measured:
    """The costs of clients on one device.

    Attributes:
        place: the device, for messages.
        vectorized: whether clients are stacked there.
        first_step_s: seconds from the begin to the end of the first local step, with reading the client's samples.
        step_s: seconds of a local step of one client after that.
        client_bytes: device memory that a client takes while it is trained; stacked, each further one.
        base_bytes: device memory that an actor takes in addition.
        held_bytes: device memory that an actor may come to keep samples in; all that it could use, if ``divides``.
        device_free_bytes: what the run's actors may take of the device altogether.
        device_total_bytes: what the device has.
        divides: whether the actors on the device divide a part of its memory among them to keep samples in.
        saves_memory: whether steps had too little memory before they took less of it and more time.
        exclusive: whether the device, by its compute mode, takes one process alone.
    """

    place: str
    vectorized: bool
    first_step_s: float
    step_s: float
    client_bytes: int
    base_bytes: int
    held_bytes: int
    device_free_bytes: int
    device_total_bytes: int
    divides: bool = False
    saves_memory: bool = False
    exclusive: bool = False

    def held_by(self, sharing: int) -> int:
        """Bytes that each of ``sharing`` actors on the device may come to keep samples in."""
        if not self.divides:
            return self.held_bytes
        return min(self.held_bytes, automatic_data_memory(self.device_free_bytes, sharing))


class ProbeFailedError(Exception):
    """No call could be measured; the message says why."""


class ShortenedEngine(Engine):
    """An engine that runs and times only the first steps of local updates.

    Attributes:
        limit: steps of each update.
        seconds: spent on local updates.
        steps: done in them, of all clients together.
        widest: clients of the largest stack so far.
    """

    limit = 1
    seconds = 0.0
    steps = 0
    widest = 1

    def execute(self, requests: Sequence[Request]) -> list[Any]:
        cut = [self._short(request) for request in requests]
        started = self._now()
        replies = super().execute(cut)
        updates = [request for request in cut if isinstance(request, TrainRequest)]
        if updates:
            self.seconds += self._now() - started
            self.steps += sum(request.plan.steps for request in updates)
        return replies

    def _run(self, group: list[Request]) -> list[Any]:
        self.widest = max(self.widest, len(group))
        return super()._run(group)

    def _short(self, request: Request) -> Request:
        if isinstance(request, TrainRequest) and request.plan.steps > self.limit:
            return request.pieces(self.limit)[0]
        return request

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def measure(
    host: ClientHost,
    engine: EngineConfig,
    calls: Sequence[ProbeCall],
    memory: DeviceMemory,
    place: str,
    held_bytes: int = 0,
    divides: bool = False,
) -> Measured:
    """Measures a few steps of the first call that works.

    Args:
        host: made for this; its states are not those of the experiment afterwards.
        engine: the configuration of its engine.
        calls: what may be run, best first (:func:`actors.probing.probe_calls.probe_calls`).
        memory: meters the host's device.
        place: what the device is called in messages.
        held_bytes: :attr:`Measured.held_bytes`.
        divides: :attr:`Measured.divides`.

    Raises:
        ResourceError: when the device has too little memory for a single client.
        ProbeFailedError: when none of the calls works.
    """
    reason = "no client that takes part has training samples"
    for call in calls:
        if not call.job.clients:
            continue
        short = ShortenedEngine(host.engine.task, host.engine.device, engine)
        host.engine = short
        if call.is_fedavg:
            host.algorithm = FedAvg()
        try:
            return replace(_measure_call(host, short, call, memory, place), held_bytes=held_bytes, divides=divides)
        except DeviceLostError as error:
            raise ProbeFailedError(str(error)) from error
        except Exception as error:
            if ran_out_of_memory(error):
                raise ResourceError(_too_large(memory, place, call.job)) from None
            reason = str(error)
            host.rewind()
    raise ProbeFailedError(reason)


def _measure_call(
    host: ClientHost, short: ShortenedEngine, call: ProbeCall, memory: DeviceMemory, place: str
) -> Measured:
    started = time.perf_counter()
    together = call.job.clients[: short.width]
    host.run(replace(call.job, clients=together), call.broadcast)
    first_step_s = time.perf_counter() - started
    if not short.steps:
        raise ProbeFailedError(f"{call.job.procedure} trains nobody")
    memory.mark()
    room = memory.room()
    short.limit, short.seconds, short.steps = _TIMED_STEPS, 0.0, 0
    host.run(replace(call.job, clients=together[:1]), call.broadcast)
    step_s = short.seconds / short.steps
    one = client = max(memory.peak(), 1)
    waiting = 0
    if not short.vectorized and len(call.job.clients) > 1:
        # A sum is made of several messages only, and of more clients more of them wait to be added.
        short.limit = _FEW_STEPS
        memory.mark()
        host.run(replace(call.job, splits=()), call.broadcast)
        one = client = max(memory.peak(), one)
        waiting = MAX_WAITING_BYTES
    # Fewer fitted if the engine has halved its width; and fewer may fill the rows of a step.
    together = together[: min(short.width, short.widest)]
    if len(together) > 1:
        client = _of_a_stack(host, short, call, memory, together, one)
    return Measured(
        place,
        short.vectorized,
        first_step_s,
        step_s,
        client,
        room.own + max(one - client, 0) + waiting,
        0,
        room.free,
        room.total,
        saves_memory=short.saves_memory,
    )


def _of_a_stack(
    host: ClientHost, short: ShortenedEngine, call: ProbeCall, memory: DeviceMemory, together: Sequence[int], one: int
) -> int:
    """Returns the bytes that each further client of a stack takes.

    On accelerators scores are left out: stacked ones are made in pieces of bounded size, however many clients there
    are, in the memory that training has left and in the tenth that no plan uses.

    Args:
        host: see :func:`measure`.
        short: its engine.
        call: see :func:`measure`.
        memory: see :func:`measure`.
        together: clients of a stack.
        one: bytes that the first of them takes alone, with its scores.
    """
    short.limit = _FEW_STEPS
    splits = call.job.splits if host.engine.device.type == "cpu" else ()

    def peak(clients: Sequence[int]) -> int:
        memory.mark()
        host.run(replace(call.job, clients=tuple(clients), splits=splits), call.broadcast)
        return memory.peak()

    alone = one if splits == call.job.splits else peak(together[:1])
    return max((peak(together) - alone) // (len(together) - 1), 1)


def _too_large(memory: DeviceMemory, place: str, job: Job) -> str:
    room = memory.room()
    free, taken, total = (size / 2**30 for size in (room.free, room.taken, room.total))
    others = f" (other processes have {taken:.1f} of {total:.1f})" if taken else ""
    return (
        f"{place} has {free:.1f} GiB for this run{others}, too little for one client at a time (client "
        f"{job.clients[0]}, {job.procedure}): lower train.batch_size, take a smaller model, or train on CPUs "
        "(cluster.device=cpu)"
    )
