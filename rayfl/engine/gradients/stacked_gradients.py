"""The gradients of stacked clients' losses, by autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from rayfl.engine.updates.requests import one_value
from rayfl.tasks.base import Task, begin_step

Loss = Callable[..., Tensor]
"""``loss(tensors by path, x, y, mask, *others) -> scalar`` of one client."""


class StackedGradients:
    """Computes the gradients of a loss that is mapped over clients.

    One client's loss does not depend on another's parameters, so the gradient of the sum of all losses holds each
    client's own gradient.

    Args:
        loss: the loss of one client.
        task: its networks are given the step's random keys.
        others: ``in_dims`` of ``vmap`` for further arguments of the loss: 0 if stacked, None if shared.
        first: whether this is the first loss of a step; a later one draws new random numbers from the same key.
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
        """Returns the gradients for one mini-batch of each client.

        Args:
            tensors: by path, shape (N, *shape); a forward pass may write to those that are not moved.
            moved: the paths to differentiate with respect to.
            key: random keys of the step, shape (N,); None if no layer draws numbers.
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
            return one_value(self._loss(model, x, y, mask, *rest))

        stacked = (0 if key is not None else None, 0, 0, 0 if mask is not None else None)
        variables = {path: tensors[path].detach().requires_grad_() for path in moved}
        losses = vmap(loss, in_dims=(0, *stacked, *self._others))({**tensors, **variables}, key, x, y, mask, *others)
        found = torch.autograd.grad(losses.sum(), list(variables.values()), materialize_grads=True)
        return list(found)
