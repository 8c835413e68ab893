"""The gradient of the task's loss at a model whose tensors lie in buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.chain import writing_gradients
from rayfl.tasks import Batch, Classification


class LossGradient:
    """Takes the gradient of a loss, mini-batch by mini-batch.

    Fully connected networks have it written out, others from autograd.

    Args:
        task: knows the network and the loss.
        model: its parameters, views of buffers, and other tensors; all are read at every call.
        into: by parameter, where its gradient goes; what is not there is constant.

    Attributes:
        written: whether gradients are written to ``into`` without being made elsewhere first.
    """

    def __init__(self, task: Any, model: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        self._targets = list(into.values())
        layers = task.chain(model) if isinstance(task, Classification) else None
        self.written = layers is not None
        if layers is not None:
            self._write = writing_gradients(layers, task.chain({name: into.get(name) for name in model}))
        else:
            self._variables = [model[name].detach().requires_grad_() for name in into]
            self._loss = _loss_at({**model, **dict(zip(into, self._variables, strict=True))}, task)

    def write(self, batch: Batch) -> None:
        """Writes the gradients."""
        if self.written:
            self._write(batch.x, batch.y)
        else:
            torch._foreach_copy_(self._targets, self.made(batch))

    def made(self, batch: Batch) -> list[Tensor]:
        """The gradients as autograd makes them, contiguous; where they are written instead, see :attr:`written`."""
        with torch.enable_grad():
            found = torch.autograd.grad(self._loss(batch), self._variables, materialize_grads=True)
        return [gradient.contiguous() for gradient in found]


def _loss_at(model: Mapping[str, Tensor], task: Any) -> Callable[[Batch], Tensor]:
    return lambda batch: task.loss(model, batch)
