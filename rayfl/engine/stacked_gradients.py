"""The gradients of stacked clients' losses, by autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from rayfl.engine.tasks import Task, begin_step

Loss = Callable[..., Tensor]
"""``loss(tensors by path, x, y, mask, *others) -> scalar`` of one client."""


class StackedGradients:
    """Takes the gradients of a loss that is mapped over clients.

    Those of one client's loss are zero with respect to another's parameters: the gradient of the sum of all losses is
    each client's own.

    Args:
        loss: of one client.
        task: has the networks that are told of every step.
        others: by further argument of the loss, along which dimension its tensors are stacked (0); None where clients
            share it.
        first: whether it is the first of a step; another one draws what follows in the step.
    """

    def __init__(self, loss: Loss, task: Task, others: Sequence[Any] = (), first: bool = True) -> None:
        self._loss, self._task, self._others, self._first = loss, task, tuple(others), first

    def __call__(
        self,
        tensors: Mapping[str, Tensor],
        moved: Sequence[str],
        key: Tensor | None,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        *others: Any,
    ) -> list[Tensor]:
        """The gradients of a mini-batch of each client.

        Args:
            tensors: by path, shape (N, *shape); a forward pass may write to those that are not moved.
            moved: the paths of those whose gradients are wanted.
            key: of the step's random numbers, shape (N,); None where no network is told of steps.
            x: inputs, shape (N, b, *input shape).
            y: targets, N times b of them.
            mask: shape (N, b); None if there is no padding.
            others: further arguments of the loss.
        """

        def loss(
            model: Mapping[str, Tensor], key: Tensor | None, x: Tensor, y: Tensor, mask: Any, *rest: Any
        ) -> Tensor:
            if key is not None:
                begin_step(self._task, key, mask is not None, self._first)
            return self._loss(model, x, y, mask, *rest)

        stacked = (0 if key is not None else None, 0, 0, 0 if mask is not None else None)
        variables = {path: tensors[path].detach().requires_grad_() for path in moved}
        losses = vmap(loss, in_dims=(0, *stacked, *self._others))({**tensors, **variables}, key, x, y, mask, *others)
        found = torch.autograd.grad(losses.sum(), list(variables.values()), materialize_grads=True)
        return list(found)
