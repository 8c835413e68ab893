"""The gradient of the task's loss, written into preallocated buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.updates.requests import one_value
from rayfl.tasks.base import Batch
from rayfl.tasks.chain import Layer, MlpGradients
from rayfl.tasks.classification import Classification


def layers_of(task: Any, model: Mapping[str, Tensor]) -> list[Layer] | None:
    """Returns the layers of a model with a hand-written gradient; None if autograd is needed."""
    return task.chain(model) if isinstance(task, Classification) else None


class LossGradient:
    """Computes the gradient of the task's loss; for MLPs without autograd.

    Args:
        task: has the network and the loss.
        model: its tensors, which are read at every call.
        into: by parameter, the tensor for its gradient; other parameters are constants.
        apart: by further parameter, the name under which its gradient is left, as autograd made it; for no MLP.
        left: where these gradients are left, as vectors.
    """

    def __init__(
        self,
        task: Any,
        model: Mapping[str, Tensor],
        into: Mapping[str, Tensor],
        apart: Mapping[str, str],
        left: dict[str, Tensor],
    ) -> None:
        self._apart, self._left = tuple(apart.values()), left
        layers = layers_of(task, model)
        buffers: Any = None if layers is None else task.chain({name: into.get(name) for name in model})
        self._manual = None if layers is None else MlpGradients(layers, buffers)
        self._variables = {name: model[name].detach().requires_grad_() for name in (*apart, *into)}
        self._task, self._model, self._buffers = task, {**model, **self._variables}, list(into.values())

    def compute(self, batch: Batch) -> None:
        """Computes the gradient on a mini-batch, and writes it to ``into`` or leaves it in ``left``."""
        if self._manual is not None:
            self._manual.compute(batch.x, batch.y)
            return
        with torch.enable_grad():
            loss = one_value(self._task.loss(self._model, batch))
            made = torch.autograd.grad(loss, list(self._variables.values()), materialize_grads=True)
        self._left.update(zip(self._apart, (gradient.reshape(-1) for gradient in made), strict=False))
        if self._buffers:
            torch._foreach_copy_(self._buffers, made[len(self._apart) :])
