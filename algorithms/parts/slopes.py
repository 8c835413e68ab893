"""Gradients that an objective computes itself, looped and stacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from algorithms.parts.mixture import parameters
from rayfl.errors import MethodError
from rayfl.models.forward_pass import is_stacked
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch, Model, Task


def slope(model: Model, at: Model, batch: Batch, task: Task) -> Tree:
    """The gradient of the task's loss with respect to the parameters, differentiable itself.

    Args:
        model: lends its buffers, which stay as they are.
        at: the parameters.
        batch: the samples.
        task: the loss.
    """

    def value(moved: Model) -> Tensor:
        # copied here: torch.func.grad lets nobody write to what lies outside of the function
        return task.loss({**copy(buffers(model, task)), **moved}, batch)

    if takes_transforms(task):
        found: Tree = torch.func.grad(value)(dict(at))
        return found
    parts = torch.autograd.grad(value(at), list(at.values()), create_graph=True, materialize_grads=True)
    return dict(zip(at, parts, strict=True))


def check_second_derivative(at: Model, task: Task) -> None:
    """Checks that what :func:`slope` returns can be differentiated, where clients are stacked.

    Raises:
        MethodError: when it cannot; the engine then trains the clients one by one.
    """
    why = getattr(task.network, "why_not_twice_stacked", "")
    if why and any(map(is_stacked, at.values())):
        raise MethodError(why)


def constant_slope(
    model: Model, batch: Batch, task: Task, of: Callable[[Model, Batch], Tensor] | None = None
) -> tuple[Tree, Tree]:
    """The gradient of the task's loss at a model as a constant, and the buffers after that forward pass.

    Args:
        model: the model; its own buffers stay as they are.
        batch: the samples.
        task: the loss.
        of: a function in place of the loss, a scalar of a model and samples.
    """

    def value(moved: Model) -> tuple[Tensor, Tree]:
        recorded = copy(buffers(model, task))
        return (of or task.loss)({**recorded, **moved}, batch), recorded

    # detached before, so that nothing of this pass is kept for the outer gradient
    at = {name: leaf.detach() for name, leaf in parameters(model, task).items()}
    if takes_transforms(task):
        found: tuple[Tree, Tree] = torch.func.grad(value, has_aux=True)(at)
        return found
    at = {name: leaf.requires_grad_() for name, leaf in at.items()}
    loss, recorded = value(at)
    parts = torch.autograd.grad(loss, list(at.values()), materialize_grads=True)
    return dict(zip(at, parts, strict=True)), recorded


def buffers(model: Mapping[str, Tensor], task: Task) -> Tree:
    """The model without its parameters."""
    return {name: model[name] for name in task.network.buffer_names}


def takes_transforms(task: Task) -> bool:
    """Returns whether ``torch.func`` takes the network: one that cannot be stacked may have layers that it refuses.

    An output layer in parts is such a layer. A pretrained base is loaded at the first pass, which no transform allows,
    and clients over one are not stacked where an objective takes gradients.
    """
    network = task.network
    return network.vectorizable and not any(getattr(network, part, None) for part in ("output_rows", "sites"))
