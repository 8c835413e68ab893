"""Zeroth-order steps: slopes of the loss along random directions, from losses alone, without backpropagation.

The directions are made of keys (:mod:`rayfl.engine.gradients.counted_normals`): who has the key has the direction, so
that a step is told by a key and a scalar.
"""

from __future__ import annotations

from inspect import signature
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, setting
from algorithms.parts.mixture import parameters
from rayfl.engine.gradients.counted_normals import normals
from rayfl.errors import ConfigError
from rayfl.params import Tree, inner_product
from rayfl.tasks.base import Batch, Model, Task

Difference = Literal["forward", "central"]


class ZerothOrder(Algorithm):
    """A method whose local steps go along estimates of the gradient that need losses alone."""

    running_statistics: ClassVar[str] = (
        "local steps of this method read losses of models in evaluation mode, which leave them as the model began"
    )

    reduced_precision: ClassVar[str] = (
        "slopes are differences of two losses that hardly differ, which three digits do not tell apart"
    )

    perturbation: float = setting(
        1e-3, "mu", "how far from the model the losses are taken that a slope is the difference of", gt=0
    )
    difference: Difference = setting(
        "forward", "", "slopes from w and w + mu z (forward), or from w - mu z and w + mu z (central)"
    )

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        if "training" not in signature(task.loss).parameters:
            raise ConfigError(
                f"algorithm: {self.name} takes losses in evaluation mode, but the loss of task={task.name} is defined "
                "without the argument training: define loss(self, model, batch, training=True), or only loss_of, or "
                "choose another method"
            )

    def estimated(
        self, model: Model, batch: Batch, task: Task, keys: Tensor, unit: bool = False
    ) -> tuple[Tensor, Tree]:
        """Estimates the gradient of the loss of a mini-batch at a model.

        Dropout is off, and normalization reads running statistics: two draws of dropout would differ by more than the
        two models do.

        Args:
            model: w; gradients do not flow into it.
            batch: the mini-batch.
            task: has the loss.
            keys: of M directions, shape (M, 7).
            unit: whether directions are divided by their lengths, and slopes multiplied by the number of parameters.

        Returns:
            The slopes, shape (M,), and the mean over the directions of slope times direction, a tree of parameters.
        """
        fixed = {name: leaf.detach() for name, leaf in model.items()}
        point, mu = parameters(fixed, task), self.perturbation
        count = sum(leaf.numel() for leaf in point.values())

        def loss(at: Tree) -> Tensor:
            return task.loss({**fixed, **at}, batch, training=False)

        here = loss(point) if self.difference == "forward" else None
        slopes, total = [], {name: torch.zeros_like(leaf) for name, leaf in point.items()}
        for key in keys.unbind():
            numbers = normals(key, count)
            along = split(numbers / numbers.norm() if unit else numbers, point)
            ahead = loss({name: leaf + mu * along[name] for name, leaf in point.items()})
            if here is None:
                behind = loss({name: leaf - mu * along[name] for name, leaf in point.items()})
                slope = (ahead - behind) / (2 * mu)
            else:
                slope = (ahead - here) / mu
            slope = slope * count if unit else slope
            slopes.append(slope)
            total = {name: leaf + slope * along[name] for name, leaf in total.items()}
        return torch.stack(slopes), {name: leaf / len(keys) for name, leaf in total.items()}


def descending(model: Model, gradient: Tree, task: Task) -> Tensor:
    """Term of an objective whose gradient is a given tree of parameters; a scalar."""
    return inner_product(parameters(model, task), gradient)


def split(numbers: Tensor, like: Tree) -> Tree:
    """Cuts a vector into tensors of the shapes and types of a tree's, in its order."""
    parts = torch.split(numbers, [leaf.numel() for leaf in like.values()])
    return {name: part.view(leaf.shape).to(leaf.dtype) for part, (name, leaf) in zip(parts, like.items(), strict=True)}


def walked(model: Tree, keys: Tensor, amounts: Tensor, task: Task) -> Tree:
    """The model after steps along directions: w - sum_r amounts[r] z_r, with buffers as they are.

    Sums are taken in float64 in the order of the keys, so that all who have keys and amounts get the same bits. A
    direction with the amount 0 is not made.

    Args:
        model: w.
        keys: of R directions, shape (R, 7).
        amounts: shape (R,).
        task: tells parameters from buffers.
    """
    point = parameters(model, task)
    first = next(iter(model.values()))
    total = torch.zeros(sum(leaf.numel() for leaf in point.values()), dtype=torch.float64, device=first.device)
    for key, amount in zip(keys.to(first), amounts.tolist(), strict=True):
        if amount:
            total.add_(normals(key, len(total)).double(), alpha=amount)
    sums = split(total, {name: leaf.double() for name, leaf in point.items()})
    return {**model, **{name: (leaf.double() - sums[name]).to(leaf.dtype) for name, leaf in point.items()}}
