"""The gradients of a stack of clients, each of its own objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from rayfl.engine.tasks import Task
from rayfl.params import Tree, from_leaves, leaves

Gradients = Callable[..., Tree]
"""Takes stacked models and what else the objective takes; returns the gradients, stacked."""


def stacked_gradients(objective: Callable[..., Tensor], in_dims: Sequence[Any], task: Task) -> Gradients:
    """Returns the function that takes the gradients of all clients' objectives with respect to their models.

    A network that folds runs all clients as one batch. Autograd then goes through ``vmap(objective)`` from outside: no
    client's loss reads another's tensors, so the gradient of their sum is each client's own. Fused attention and layers
    that are computed again in the backward pass work there; ``grad`` inside of ``vmap`` supports neither.

    Args:
        objective: a function of one client's model and more; a scalar.
        in_dims: as for ``vmap``.
        task: knows the networks.
    """
    if not any(candidate.network.folds for candidate in task.candidates):
        return vmap(grad(objective), in_dims=tuple(in_dims))
    losses = vmap(objective, in_dims=tuple(in_dims))

    def gradients(model: Tree, *rest: Any) -> Tree:
        with torch.enable_grad():
            held = {path: leaf.detach().requires_grad_() for path, leaf in leaves(model)}
            total = losses(from_leaves(held), *rest).sum()
            made = torch.autograd.grad(total, list(held.values()), materialize_grads=True)
        return from_leaves(dict(zip(held, made, strict=True)))

    return gradients
