"""The engine: takes what clients' procedures ask for, groups equal work, runs it looped or vectorised."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.engine import looped, vectorized
from rayfl.engine.requests import GradientRequest, OutputRequest, Request, TrainRequest
from rayfl.engine.steps import Kernel
from rayfl.engine.workspace import Workspace
from rayfl.errors import as_error
from rayfl.tasks import Task

_log = logging.getLogger(__name__)
_UNMEASURED_WIDTH = 32


class EngineConfig(BaseModel):
    """How local updates are executed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["auto", "looped", "vectorized"] = Field(
        "auto", description="client by client, or many clients stacked; auto: vectorized on CUDA, looped on CPU"
    )
    width: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        32,
        description="clients stacked at a time when vectorized; halved if a GPU's memory is too small; auto: as many "
        "of an actor's clients in a round as its memory was measured to have room for (32 where nothing is measured: "
        "cluster.probe)",
    )
    kernel: Literal["reference", "fast"] = Field(
        "reference",
        description="fast: mixtures of two models (SuPerFed) in fewer operations, images of several channels laid out "
        "channels last, on CPUs and client by client; agrees with reference up to rounding (1e-5)",
    )
    lend_cores: bool = Field(
        False,
        description="on CPUs, client by client: clients that begin when other actors of their machine have none left "
        "get the cores of those; results then depend on the number of actors, up to rounding",
    )

    @model_validator(mode="after")
    def _one_by_one(self) -> EngineConfig:
        if self.kernel == "fast" and self.mode == "vectorized":
            raise ValueError("kernel=fast trains client by client: set mode=looped, or kernel=reference")
        if self.lend_cores and self.mode == "vectorized":
            raise ValueError("lend_cores is for clients trained one by one: set mode=looped, or lend_cores=false")
        return self


class Engine:
    """Executes requests on one device.

    Args:
        task: what is learned.
        device: where tensors live and steps run.
        config: looped or vectorised, and how wide.

    Attributes:
        vectorized: whether clients are stacked.
        width: clients whose procedures run together; halved whenever a GPU's memory does not suffice for so many.
        note: why a wish of the configuration could not be met; empty otherwise.
    """

    def __init__(self, task: Task, device: torch.device, config: EngineConfig) -> None:
        self.task = task
        self.device = device
        wanted = config.mode == "vectorized" or (config.mode == "auto" and device.type == "cuda")
        obstacle = next((c.network.why_not_vectorizable for c in task.candidates if not c.network.vectorizable), "")
        self.vectorized = wanted and not obstacle
        self._kernel: Kernel = config.kernel if device.type == "cpu" else "reference"
        notes = [f"clients are trained one by one: {obstacle}"] if wanted and obstacle else []
        if self._kernel != config.kernel:
            notes.append(f"engine.kernel={config.kernel} is for CPUs: on {device.type} it is {self._kernel}")
        if config.lend_cores and device.type != "cpu":
            notes.append(f"engine.lend_cores is for CPUs: on {device.type} it changes nothing")
        self.note = "; ".join(notes)
        if self.note:
            _log.warning("%s", self.note)
        width = _UNMEASURED_WIDTH if config.width == "auto" else config.width
        self.width = width if self.vectorized else 1
        self._workspace = Workspace()

    def execute(self, requests: Sequence[Request]) -> list[Any]:
        """One reply a request, in order; what a request raised is its reply."""
        replies: list[Any] = [None] * len(requests)
        for members in self._groups(requests, replies):
            group = [requests[i] for i in members]
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
        return [
            members[start : start + self.width]
            for members in groups.values()
            for start in range(0, len(members), self.width)
        ]

    def _train_stacked(self, requests: Sequence[TrainRequest], task: Task) -> list[Any]:
        """As many clients at a time as the GPU's memory has room for: half as many whenever it had not."""
        try:
            return list(vectorized.train(requests, task, self.device))
        except torch.cuda.OutOfMemoryError:
            if len(requests) == 1:
                raise
        # Not in the handler: until it is left, the error keeps the tensors of the failed attempt.
        torch.cuda.empty_cache()
        half = (len(requests) + 1) // 2
        if half < self.width:
            _log.warning("the GPU's memory is too small for %d clients at a time: %d from now on", self.width, half)
            self.width = half
        return [*self._train_stacked(requests[:half], task), *self._train_stacked(requests[half:], task)]

    def _run(self, group: list[Request]) -> list[Any]:
        try:
            first = group[0]
            task = getattr(first, "task", None) or self.task
            if isinstance(first, GradientRequest):
                return [looped.gradient(first, task, self.device)]
            if isinstance(first, OutputRequest):
                return [looped.outputs(first, task)]
            trains = [request for request in group if isinstance(request, TrainRequest)]
            if len(trains) < len(group):
                raise TypeError(f"a procedure may await what a client offers, not a {type(first).__name__}")
            if self.vectorized and any(request.plan.steps for request in trains):
                return self._train_stacked(trains, task)
            return [looped.train(request, task, self.device, self._kernel, self._workspace) for request in trains]
        except BaseException as error:
            return [as_error(error)] * len(group)
