"""Losses at a point apart from a model: uphill of it, from two passes over a mini-batch, or at a constant distance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from algorithms.parts.mixture import parameters
from algorithms.parts.slopes import buffers, constant_slope
from rayfl.objectives.points import TRAINED, Constant, Point, Scope, Share
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch, Model, Task


class Uphill(NamedTuple):
    """What two passes over a mini-batch give.

    Attributes:
        value: f(w + e) for a constant e, a scalar whose gradient is that of f at w + e.
        gradient: of f (or of what is given in its place) at w, a constant.
        apart: e, of the shapes of the gradient.
    """

    value: Tensor
    gradient: Tree
    apart: Tree


def loss_uphill(
    model: Model,
    batch: Batch,
    task: Task,
    perturbation: Callable[[Tree, Tree], Tree],
    of: Callable[[Model, Batch], Tensor] | None = None,
) -> Uphill:
    """Returns the loss at w + e, where e is made from the gradient at w.

    Both passes have the same masks of dropout. Running statistics are recorded by the first pass alone, at w.

    Args:
        model: w with its buffers, which record the first pass.
        batch: the samples, whose mean loss is f.
        task: the loss.
        perturbation: makes e from the parameters and the gradient at w, all of the same shapes.
        of: the function that has that gradient, in place of the loss; a scalar of a model and samples.
    """
    here, drawn = parameters(model, task), task.network.draws
    gradient, recorded = constant_slope(model, batch, task, of)
    task.network.draws = drawn  # the second pass has the masks of the first
    apart = perturbation({name: leaf.detach() for name, leaf in here.items()}, gradient)
    moved = {name: leaf + apart[name] for name, leaf in here.items()}
    value = task.loss({**copy(buffers(model, task)), **moved}, batch)
    for name, leaf in recorded.items():
        model[name].copy_(leaf)
    return Uphill(value, gradient, apart)


def of_length(radius: float, tree: Tree) -> Tensor:
    """Returns the factor, a scalar tensor, that gives all parameters as one vector a length; of zeros any factor does.

    Args:
        radius: the length.
        tree: the parameters.
    """
    norm = torch.stack([leaf.square().sum() for leaf in tree.values()]).sum().sqrt()
    # of a gradient of 0 the direction is none
    return radius / torch.where(norm > 0, norm, 1)


def scaled_to(radius: float, tree: Tree) -> Tree:
    """Returns the parameters times :func:`of_length`: as one vector they have the length; zeros stay zeros.

    Args:
        radius: the length.
        tree: the parameters.
    """
    factor = of_length(radius, tree)
    return {name: factor * leaf for name, leaf in tree.items()}


@dataclass(frozen=True)
class Moved(Point):
    """The trained model plus a constant, both with the same parameters; the buffers are the trained model's.

    Attributes:
        by: the name of the constant among what is frozen.
    """

    by: str

    def shares(self, scope: Scope) -> Mapping[str, Sequence[Share]]:
        """See :class:`rayfl.objectives.points.Point`."""
        return {
            name: [Share(TRAINED, name), Share(Constant(self.by), name)] for name in scope.task.network.parameter_names
        }

    def base(self, scope: Scope) -> Tree:
        """See :class:`rayfl.objectives.points.Point`."""
        return dict(scope.trained)
