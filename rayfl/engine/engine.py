"""The engine: takes what clients' procedures ask for, groups equal work, runs it looped or vectorised."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rayfl.diagnosis.device_errors import Pieces, check_context, free_device_memory, ran_out_of_memory
from rayfl.engine import looped, vectorized
from rayfl.engine.capture import Capture, CudaGraphs
from rayfl.engine.compiled_steps import Compiler
from rayfl.engine.engine_section import EngineConfig as EngineConfig
from rayfl.engine.flops import FlopCounter
from rayfl.engine.precision import why_not
from rayfl.engine.requests import SERVER, GradientRequest, Objective, OutputRequest, Request, TrainRequest
from rayfl.engine.stack_sizes import clients_for_rows
from rayfl.engine.tasks import Task
from rayfl.errors import as_error, text_of
from rayfl.models.base import Network

_log = logging.getLogger(__name__)
_REMEMBERED = 64
"""Objectives that cannot be stacked; some methods make one every round."""
UNMEASURED_WIDTH = 32
"""Clients stacked at a time where nothing says how many the memory has room for."""


class Engine:
    """Executes requests on one device.

    Args:
        task: what is learned.
        device: where tensors live and steps run.
        config: looped or vectorised, and how wide.

    Attributes:
        vectorized: whether clients are stacked.
        rows_per_step: see :class:`EngineConfig`.
        flops: counts the operations of local steps; None: nobody does.
        width: clients whose procedures run together; halved whenever a GPU's memory does not suffice for that number.
        note: why a wish of the configuration could not be met; empty otherwise.
        saves_memory: whether steps take less memory and more time than before, since there was too little of it.
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
        self.rows_per_step = config.rows_per_step
        self.flops: FlopCounter | None = None
        self.saves_memory = False
        self._said: set[str] = set()
        self._unstackable: list[Objective] = []
        self._of_gradients, self._of_outputs = Pieces("samples of a gradient"), Pieces("samples of a forward pass")

    def count_flops(self) -> None:
        """Has the floating-point operations of local steps counted from here on (:attr:`flops`)."""
        self.flops = FlopCounter(self.device)

    def check(self, error: Exception | None = None) -> None:
        """Waits for the device, and makes sure that it still computes.

        Args:
            error: what went wrong before.

        Raises:
            DeviceLostError: when this process can no longer compute there; no client is to blame for that.
        """
        check_context(self.device, error)

    def limit_width(self, width: int) -> None:
        """Limits the clients at a time to ``width``, since the device's memory was too small for more."""
        if width < self.width:
            _log.warning("the GPU's memory is too small for %d clients at a time: %d from now on", self.width, width)
            self.width = width

    def release(self) -> None:
        """Has the networks let go of what they computed with last: a client's model, or a stack of models."""
        for candidate in self.task.candidates:
            candidate.network.release()

    def execute(self, requests: Sequence[Request]) -> list[Any]:
        """Returns one reply a request, in order; what a request raised is its reply.

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
        """Positions of equal requests; one that is malformed is answered by its error."""
        if not self.vectorized:
            return [[position] for position in range(len(requests))]
        groups: dict[Any, list[int]] = {}
        for position, request in enumerate(requests):
            try:
                key = request.group() if isinstance(request, TrainRequest) else position
                groups.setdefault(key, []).append(position)
            except Exception as error:
                replies[position] = error
        # Clients with as many steps in one stack: it makes as many as the longest needs.
        ranked = [sorted(members, key=lambda i: -_steps(requests[i])) for members in groups.values()]
        widths = [self._width_of([requests[i] for i in members]) for members in ranked]
        return [
            members[start : start + width]
            for members, width in zip(ranked, widths, strict=True)
            for start in range(0, len(members), width)
        ]

    def _width_of(self, requests: Sequence[Request]) -> int:
        """How many of these are stacked at a time: within the width, as many as fill a step's products with rows."""
        largest = max((one.plan.largest for one in requests if isinstance(one, TrainRequest)), default=0)
        asked_for = clients_for_rows(self.rows_per_step, self.task, largest)
        return self.width if asked_for is None else min(self.width, asked_for)

    def _train_stacked(self, requests: Sequence[TrainRequest], task: Task) -> list[Any]:
        """Trains as many clients at a time as the GPU's memory has room for; one by one where a stack fails.

        Every attempt begins with the requests as they were: an update writes nothing before all of it is computed.
        """
        try:
            return list(vectorized.train(requests, task, self.device, self._capture, self._compiler))
        except BaseException as error:
            too_large, reason = ran_out_of_memory(error), _first_line(error)
            saves = too_large and self._save_memory(len(requests))
            if too_large and not saves and len(requests) == 1:
                return [self._own(as_error(error))]
            self.check(as_error(error))
        # Not in the handler: until it is left, the error keeps the tensors of the failed attempt.
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
        """Trains the clients of a stack that failed: the one that it failed because of raises alone, too.

        Where none does, their objective cannot be stacked, and no other stack is tried with it.
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
        """Returns whether steps take less memory from now on, of which there was too little for some clients."""
        # What a task of one's own has for a network need not be one.
        networks = [one.network for one in self.task.candidates if isinstance(one.network, Network)]
        saves = [network.save_memory() for network in networks]
        if any(saves):
            self.saves_memory = True
            _log.warning(
                "the device's memory is too small for %s at a time: from now on blocks are computed again in the "
                "backward pass (model.checkpointing=auto), which takes less memory and more time",
                "one client" if clients == 1 else f"{clients} clients",
            )
        return any(saves)

    def _answer(self, work: Callable[..., Any], *args: Any) -> Any:
        """Returns the result of some work, or the error that it raised."""
        try:
            return work(*args)
        except BaseException as error:
            return self._own(as_error(error))
        finally:
            self.release()

    def _own(self, error: Exception) -> Exception:
        """Returns an error of a client's own; raises DeviceLostError if it is the device's."""
        self.check(error)
        if self.device.type != "cpu":
            traceback.clear_frames(error.__traceback__)  # they hold tensors, and the error lives on
        return error

    def _run(self, group: list[Request]) -> list[Any]:
        """The replies to requests of one group."""
        first = group[0]
        task = getattr(first, "task", None) or self.task
        if isinstance(first, GradientRequest):
            return [self._answer(looped.gradient, first, task, self.device, self._of_gradients)]
        if isinstance(first, OutputRequest):
            return [self._answer(looped.outputs, first, task, self._of_outputs)]
        trains = [request for request in group if isinstance(request, TrainRequest)]
        if len(trains) < len(group):
            return [TypeError(f"a procedure may await what a client offers, not a {type(first).__name__}")] * len(group)
        # The server has nobody to be stacked with.
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
    return (text_of(error).strip().splitlines() or [type(error).__name__])[0]
