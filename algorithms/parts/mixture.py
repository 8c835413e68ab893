"""Models made of two: their weights mixed, with the buffers of a third."""

from __future__ import annotations

from torch import Tensor

from rayfl.params import Tree, interpolate
from rayfl.tasks.base import Model, Task


def parameters(model: Model, task: Task) -> Tree:
    """The model without its buffers."""
    return {name: model[name] for name in task.network.parameter_names}


def mixed_weights(start: Model, end: Model, coefficient: float | Tensor, task: Task, buffers: Model) -> Tree:
    """The model whose parameters are ``(1 - coefficient) start + coefficient end``; exact at 0 and at 1.

    Args:
        start: a model.
        end: a model of the same network.
        coefficient: a number, or a scalar tensor.
        task: tells parameters from buffers.
        buffers: the model whose buffers the mixture has: themselves, not copies, so that what a forward pass in
            training mode records in them is recorded there.
    """
    return {**buffers, **interpolate(parameters(start, task), parameters(end, task), coefficient)}
