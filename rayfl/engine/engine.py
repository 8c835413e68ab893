"""The engine: executes the requests of clients' procedures; groups equal work and runs it looped or vectorised."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rayfl.diagnosis.device_errors import (
    Pieces,
    check_context,
    free_device_memory,
    memory_beside,
    ran_out_of_memory,
)
from rayfl.engine.engine_section import EngineConfig as EngineConfig
from rayfl.engine.precision import why_not
from rayfl.engine.stack_sizes import clients_for_rows, rows_per_step_of
from rayfl.engine.stacks import vectorized
from rayfl.engine.stacks.capture import Capture, CudaGraphs
from rayfl.engine.stacks.compiled_steps import Compiler
from rayfl.engine.stacks.padding import PaddingCheck
from rayfl.engine.steps import looped
from rayfl.engine.steps.flops import FlopCounter
from rayfl.engine.updates.requests import SERVER, GradientRequest, Objective, OutputRequest, Request, TrainRequest
from rayfl.errors import as_error, text_of
from rayfl.models.base import Network
from rayfl.tasks.base import Task

_log = logging.getLogger(__name__)
_REMEMBERED = 64
"""Objectives that cannot be stacked; some methods make one every round."""
UNMEASURED_WIDTH = 32
"""Clients stacked at a time where the available memory is unknown."""


class Engine:
    """Executes requests on one device.

    Args:
        task: what is learned.
        device: where tensors live and steps run.
        config: looped or vectorised, and how wide.

    Attributes:
        vectorized: whether clients are stacked.
        rows_per_step: rows of a step that stacks are filled to; None if there is no limit.
        flops: counts the operations of local steps; None if they are not counted.
        width: clients whose procedures run together; halved whenever the GPU runs out of memory.
        note: why a requested mode is unavailable; empty if none is.
        saves_memory: whether activation checkpointing was switched on after running out of memory.
    """

    def __init__(self, task: Task, device: torch.device, config: EngineConfig) -> None:
        self.task = task
        self.device = device
        wanted = config.stacked or (config.mode == "auto" and device.type == "cuda")
        obstacle = next((c.network.why_not_vectorizable for c in task.candidates if not c.network.vectorizable), "")
        self.vectorized = wanted and not obstacle
        notes = [f"clients are trained one by one: {obstacle}"] if wanted and obstacle else []
        notes += why_not(config.precision, device)
        on_gpu = device.type == "cuda"
        notes += [] if on_gpu or not config.capture else [f"engine.capture is for GPUs, it changes nothing on {device}"]
        self.note = "; ".join(notes)
        if self.note:
            _log.warning("%s", self.note)
        width = config.width if isinstance(config.width, int) else UNMEASURED_WIDTH
        self.width = width if self.vectorized else 1
        if config.precision == "bfloat16":
            for candidate in task.candidates:
                candidate.network.compute_in(torch.bfloat16)
        self._capture = Capture(CudaGraphs(device)) if config.capture and self.vectorized and on_gpu else None
        self._compiler = Compiler(device) if config.compile and self.vectorized else None
        self.rows_per_step = rows_per_step_of(config, device)
        self.flops: FlopCounter | None = None
        self.saves_memory = False
        self._said: set[str] = set()
        self._unstackable: list[Objective] = []
        self._padding = PaddingCheck()
        self._of_gradients, self._of_outputs = Pieces("samples of a gradient"), Pieces("samples of a forward pass")

    def count_flops(self) -> None:
        """Starts counting the floating-point operations of local steps (:attr:`flops`)."""
        self.flops = FlopCounter(self.device)

    def check(self, error: Exception | None = None) -> None:
        """Synchronizes with the device and checks that it still works.

        Args:
            error: the error that prompts the check.

        Raises:
            DeviceLostError: when this process can no longer use the device; no client is to blame for that.
        """
        check_context(self.device, error)

    def limit_width(self, width: int) -> None:
        """Limits the clients that run together to ``width``, after the device ran out of memory with more."""
        if width < self.width:
            too_many = "the GPU's memory is too small for %d clients at a time: %d from now on%s"
            _log.warning(too_many, self.width, width, memory_beside())
            self.width = width

    def release(self) -> None:
        """Frees the tensors that the networks still refer to: the last client's model, or stack of models."""
        for candidate in self.task.candidates:
            candidate.network.release()

    def execute(self, requests: Sequence[Request]) -> list[Any]:
        """Returns one reply per request, in order; a failed request's reply is its exception.

        Raises:
            DeviceLostError: when this process can no longer compute on the device.
        """
        replies: list[Any] = [None] * len(requests)
        for members in self._groups(requests, replies):
            group = [requests[i] for i in members]
            if self.flops is not None:
                for request in group:
                    if isinstance(request, TrainRequest):
                        self.flops.add(request, request.task or self.task)
            for position, reply in zip(members, self._run(group), strict=True):
                replies[position] = reply
        return replies

    def _groups(self, requests: Sequence[Request], replies: list[Any]) -> list[list[int]]:
        """Groups the positions of equal requests; a malformed request gets its error as reply."""
        if not self.vectorized:
            return [[position] for position in range(len(requests))]
        groups: dict[Any, list[int]] = {}
        for position, request in enumerate(requests):
            try:
                key = request.group() if isinstance(request, TrainRequest) else position
                groups.setdefault(key, []).append(position)
            except Exception as error:
                replies[position] = error
        # Stack clients with similar numbers of steps: a stack runs as many as its longest client needs.
        ranked = [sorted(members, key=lambda i: -_steps(requests[i])) for members in groups.values()]
        widths = [self._width_of([requests[i] for i in members]) for members in ranked]
        return [
            members[start : start + width]
            for members, width in zip(ranked, widths, strict=True)
            for start in range(0, len(members), width)
        ]

    def _width_of(self, requests: Sequence[Request]) -> int:
        """Returns how many of these to stack: at most the width, and enough to fill a step's matrix products."""
        largest = max((one.plan.largest for one in requests if isinstance(one, TrainRequest)), default=0)
        asked_for = clients_for_rows(self.rows_per_step, self.task, largest)
        return self.width if asked_for is None else min(self.width, asked_for)

    def _train_stacked(self, requests: Sequence[TrainRequest], task: Task) -> list[Any]:
        """Trains as many clients at a time as fit into the GPU's memory; one by one if a stack fails.

        Attempts can be repeated: an update writes its results only when all of it is computed.
        """
        try:
            return list(vectorized.train(requests, task, self.device, self._capture, self._compiler, self._padding))
        except BaseException as error:
            too_large, reason = ran_out_of_memory(error), _first_line(error)
            saves = too_large and self._save_memory(len(requests))
            if too_large and not saves and len(requests) == 1:
                return [self._own(as_error(error))]
            self.check(as_error(error))
        # Outside the handler: inside it, the exception would keep the failed attempt's tensors alive.
        self.release()
        if not too_large:
            return self._train_one_by_one(requests, task, reason)
        free_device_memory()
        if saves:
            return self._train_stacked(requests, task)
        half = (len(requests) + 1) // 2
        self.limit_width(half)
        return [*self._train_stacked(requests[:half], task), *self._train_stacked(requests[half:], task)]

    def _train_one_by_one(self, requests: Sequence[TrainRequest], task: Task, reason: str) -> list[Any]:
        """Trains the clients of a failed stack one by one, so that the client at fault raises its own error.

        If none raises, the objective cannot be stacked, and is run looped from then on.
        """
        replies = [self._answer(self._train_looped, request, task) for request in requests]
        if any(isinstance(reply, Exception) for reply in replies):
            return replies
        objective = requests[0].objective
        self._unstackable = [*self._unstackable, objective][-_REMEMBERED:]
        if reason not in self._said:
            self._said.add(reason)
            _log.warning(
                "%d clients failed together, but not one by one: %s; those with %s are trained one by one from now on",
                len(requests),
                reason,
                _name_of(objective),
            )
        return replies

    def _train_looped(self, request: TrainRequest, task: Task) -> Any:
        try:
            return looped.train(request, task, self.device)
        except Exception as error:
            if not ran_out_of_memory(error) or not self._save_memory(1):
                raise
        self.release()
        free_device_memory()
        return looped.train(request, task, self.device)

    def _save_memory(self, clients: int) -> bool:
        """Switches on activation checkpointing after running out of memory; returns whether that changed anything."""
        # A custom task's ``network`` may be any object.
        networks = [one.network for one in self.task.candidates if isinstance(one.network, Network)]
        saves = [network.save_memory() for network in networks]
        if any(saves):
            self.saves_memory = True
            _log.warning(
                "the device's memory is too small for %s at a time: from now on blocks are computed again in the "
                "backward pass (model.checkpointing=auto), which takes less memory and more time%s",
                "one client" if clients == 1 else f"{clients} clients",
                memory_beside(),
            )
        return any(saves)

    def _answer(self, work: Callable[..., Any], *args: Any) -> Any:
        """Returns the result of some work, or the exception that it raised."""
        try:
            return work(*args)
        except BaseException as error:
            return self._own(as_error(error))
        finally:
            self.release()

    def _own(self, error: Exception) -> Exception:
        """Returns an error that a client caused; raises DeviceLostError if the device caused it."""
        self.check(error)
        if self.device.type != "cpu":
            traceback.clear_frames(error.__traceback__)  # frames hold tensors, and the error outlives them
        return error

    def _run(self, group: list[Request]) -> list[Any]:
        """Returns the replies to the requests of one group."""
        first = group[0]
        task = getattr(first, "task", None) or self.task
        if isinstance(first, GradientRequest):
            return [self._answer(looped.gradient, first, task, self.device, self._of_gradients)]
        if isinstance(first, OutputRequest):
            return [self._answer(looped.outputs, first, task, self._of_outputs)]
        trains = [request for request in group if isinstance(request, TrainRequest)]
        if len(trains) < len(group):
            return [TypeError(f"a procedure may await what a client offers, not a {type(first).__name__}")] * len(group)
        # The server's own updates are never stacked.
        stacked = self.vectorized and first.client != SERVER and trains[0].objective not in self._unstackable
        if stacked and any(request.plan.steps for request in trains):
            found = self._answer(self._train_stacked, trains, task)
            return [found] * len(trains) if isinstance(found, Exception) else found
        return [self._answer(self._train_looped, request, task) for request in trains]


def _steps(request: Request) -> int:
    return request.plan.steps if isinstance(request, TrainRequest) else 0


def _name_of(objective: Objective) -> str:
    return f"the objective {getattr(objective, '__qualname__', type(objective).__name__)}"


def _first_line(error: BaseException) -> str:
    line = (text_of(error).strip().splitlines() or [""])[0]
    kind = type(error).__name__
    # of a key that is missing the text is the key alone
    return f"{kind}: {line}" if line and isinstance(error, KeyError) else line or kind
