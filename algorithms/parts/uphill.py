"""The loss at a point uphill of a model, from two passes over the same mini-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from algorithms.parts.mixture import parameters
from algorithms.parts.slopes import buffers, constant_slope
from rayfl.engine.tasks import Batch, Model, Task
from rayfl.params import Tree, copy


def loss_uphill(
    model: Model, batch: Batch, task: Task, perturbation: Callable[[Tree, Tree], Tree]
) -> tuple[Tensor, Tree]:
    """Returns f(w + e) for a constant e, a scalar whose gradient is that of f at w + e, and the gradient of f at w.

    Both passes have the same masks of dropout. Running statistics are recorded by the first pass alone, at w.

    Args:
        model: w with its buffers, which record the first pass.
        batch: the samples, whose mean loss is f.
        task: the loss.
        perturbation: makes e from the parameters and the gradient at w, all of the same shapes.
    """
    here, drawn = parameters(model, task), task.network.draws
    gradient, recorded = constant_slope(model, batch, task)
    task.network.draws = drawn  # the second pass has the masks of the first
    apart = perturbation({name: leaf.detach() for name, leaf in here.items()}, gradient)
    moved = {name: leaf + apart[name] for name, leaf in here.items()}
    value = task.loss({**copy(buffers(model, task)), **moved}, batch)
    for name, leaf in recorded.items():
        model[name].copy_(leaf)
    return value, gradient


def of_length(radius: float, tree: Tree) -> Tensor:
    """Returns the factor, a scalar tensor, that gives all parameters as one vector a length; of zeros any factor does.

    Args:
        radius: the length.
        tree: the parameters.
    """
    norm = torch.stack([leaf.square().sum() for leaf in tree.values()]).sum().sqrt()
    # of a gradient of 0 the direction is none
    return radius / torch.where(norm > 0, norm, 1)
