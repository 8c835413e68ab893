"""The gradient of the task's loss, written into rooms of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.chain import WrittenGradients
from rayfl.engine.classification import Classification
from rayfl.engine.tasks import Batch


class LossGradient:
    """The gradient of the task's loss; that of a fully connected network's is written out.

    Args:
        task: knows the network and the loss.
        model: its tensors, which are read at every call.
        into: by parameter, where its gradient goes; the others are constant.
    """

    def __init__(self, task: Any, model: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        layers = task.chain(model) if isinstance(task, Classification) else None
        room: Any = None if layers is None else task.chain({name: into.get(name) for name in model})
        self.written = None if layers is None else WrittenGradients(layers, room)
        self._variables = {name: model[name].detach().requires_grad_() for name in into}
        self._task, self._model, self._into = task, {**model, **self._variables}, into
        self.direct: list[str] = []
        self.mover: Callable[[list[Tensor]], None] | None = None

    def write(self, batch: Batch) -> None:
        """Writes it where it belongs."""
        if self.written is not None:
            self.written.write(batch.x, batch.y)
            return
        with torch.enable_grad():
            loss = self._task.loss(self._model, batch)
            made = torch.autograd.grad(loss, list(self._variables.values()), materialize_grads=True)
        self._made = dict(zip(self._into, made, strict=True))
        if copied := [name for name in self._into if name not in self.direct]:
            torch._foreach_copy_([self._into[name] for name in copied], [self._made[name] for name in copied])

    def move(self) -> None:
        """Moves what only this gradient moves."""
        if self.mover is not None:
            self.mover([self._made[name] for name in self.direct])
