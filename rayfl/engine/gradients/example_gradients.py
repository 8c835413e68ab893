"""Differentially private gradients: those of single samples, clipped, summed, with noise.

A step on a mini-batch follows, in place of the gradient of the mean loss,

    (sum over its samples i of g_i min(1, C / ||g_i||)  +  z C N(0, 1)) / B

with g_i the gradient of all the objective's losses on sample i alone, with respect to all trained parameters ("flat
clipping"), and B the expected size of a mini-batch. Terms that read no samples
(:class:`rayfl.objectives.terms.Penalty`) add their gradients as they are.

Every sample is one row of a stack of models, like a client of a stack: whatever can be stacked has gradients of single
samples.

Source: Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: Deep Learning with Differential Privacy, CCS 2016,
Algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.gradients.counted_normals import keyed_normals
from rayfl.engine.gradients.stacked_gradients import StackedGradients
from rayfl.engine.updates.feed import of_step
from rayfl.engine.updates.requests import Objective, TrainRequest
from rayfl.errors import MethodError
from rayfl.models.forward_pass import keys_of
from rayfl.models.splitmix import SECOND, signed
from rayfl.objectives.terms import Loss, Penalty, Sum
from rayfl.params import from_leaves, map_leaves
from rayfl.tasks.base import Batch, Task, tells_steps

_AT_A_TIME = 1 << 26
"""Entries of the gradients of single samples that a client has in memory at a time, unless one sample has more."""


def of_samples_and_others(objective: Objective) -> tuple[Sum, Sum]:
    """Returns the terms of an objective that read samples, and those that do not.

    Raises:
        MethodError: when that cannot be told apart, or no term reads samples.
    """
    terms = objective.terms if isinstance(objective, Sum) else ()
    losses = tuple(pair for pair in terms if isinstance(pair[1], Loss))
    others = tuple(pair for pair in terms if isinstance(pair[1], Penalty))
    if not losses or len(losses) + len(others) < len(terms):
        raise MethodError(
            "privacy.example_clip_norm: gradients of single samples are known for objectives that are sums of the "
            "task's loss (rayfl.objectives.terms.loss) and of penalties, and this one is another function"
        )
    return Sum(losses), Sum(others)


class ExampleGradients:
    """Computes the private gradients of stacked clients.

    Args:
        ranked: the clients' requests, those with most steps first; all have ``private``.
        task: what the objective is given.
        frozen_dims: by path, 0 for entries of ``frozen`` that are stacked, None for those that clients share; None
            without any.
        device: where to compute.
    """

    def __init__(self, ranked: Sequence[TrainRequest], task: Task, frozen_dims: Any, device: torch.device) -> None:
        first = ranked[0]
        whole = [request.private for request in ranked if request.private is not None]
        self._bound, self._deviation = whole[0].clip_norm, whole[0].clip_norm * whole[0].noise_multiplier
        # on the device from the first step on: a step waits for no transfer
        self._expected = torch.tensor([private.expected for private in whole], dtype=torch.float64, device=device)
        self._frozen_dims = frozen_dims
        dims = (frozen_dims, None if first.draws is None else 0)
        losses, others = of_samples_and_others(first.objective)
        self._losses = StackedGradients(partial(_value, losses, task), task, dims)
        self._others = StackedGradients(partial(_value, others, task), task, dims) if others.terms else None
        begun, steps = [request.begun for request in ranked], first.plan.steps
        self._noise = torch.from_numpy(keys_of([private.seed for private in whole], begun, steps)).to(device)
        self._keys = None
        if tells_steps(task):
            self._keys = torch.from_numpy(keys_of([request.seed for request in ranked], begun, steps)).to(device)

    def __call__(
        self,
        number: int | Tensor,
        tensors: Mapping[str, Tensor],
        moved: Sequence[str],
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        frozen: Any,
        draw: Any,
    ) -> list[Tensor]:
        """Returns the gradients of a step, each of shape (N, *shape), for the first N clients.

        Args:
            number: of the step.
            tensors: by path, shape (N, *shape).
            moved: the paths to differentiate with respect to.
            x: inputs, shape (N, b, *input shape); b may be 0.
            y: targets, N times b of them.
            mask: 1 for a sample and 0 for padding, shape (N, b); None if there is no padding.
            frozen: the entries of ``frozen``, stacked as ``frozen_dims`` says.
            draw: the step's draws, stacked; None without any.
        """
        clients, width = x.shape[:2]
        order = sorted(moved)
        sizes = [tensors[path][0].numel() for path in order]
        totals = [tensors[path].new_zeros(clients, size) for path, size in zip(order, sizes, strict=True)]
        key = None if self._keys is None else of_step(self._keys, number, clients)
        rows = max(_AT_A_TIME // sum(sizes), 1)
        for start in range(0, width, rows):
            part = slice(start, min(start + rows, width))
            made = self._of_samples(tensors, order, key, x[:, part], y[:, part], start, frozen, draw)
            norms = torch.stack([gradient.square().sum(-1) for gradient in made]).sum(0).sqrt()
            shares = (self._bound / norms).clamp(max=1)  # a gradient of zero has the factor min(inf, 1)
            if mask is not None:
                shares = shares * mask[:, part]
            for total, gradient in zip(totals, made, strict=True):
                # Not in place: where a network adds two parameters, such as an LSTM's biases, both have one gradient.
                total += (gradient * shares[..., None]).sum(1)
        if self._deviation:
            dtype = torch.promote_types(totals[0].dtype, torch.float32)
            noise = keyed_normals(of_step(self._noise, number, clients), sum(sizes), dtype).to(totals[0].dtype)
            for total, share in zip(totals, torch.split(noise, sizes, -1), strict=True):
                total.add_(share, alpha=self._deviation)
        expected = self._expected[:clients, None].to(totals[0].dtype)
        found = {path: (total / expected).view_as(tensors[path]) for path, total in zip(order, totals, strict=True)}
        if self._others is not None:
            with torch.enable_grad():
                added = self._others(tensors, order, None, x, y, mask, frozen, draw)
            for path, gradient in zip(order, added, strict=True):
                found[path] += gradient
        return [found[path] for path in moved]

    def _of_samples(
        self,
        tensors: Mapping[str, Tensor],
        order: Sequence[str],
        key: Tensor | None,
        x: Tensor,
        y: Tensor,
        start: int,
        frozen: Any,
        draw: Any,
    ) -> list[Tensor]:
        """Returns the gradients of single samples, by path in ``order``, each of shape (N, b, numbers of the tensor).

        Args:
            tensors: by path, shape (N, *shape).
            order: the paths to differentiate with respect to.
            key: random keys of the step, shape (N,); None if no layer draws numbers.
            x: inputs, shape (N, b, *input shape).
            y: targets, N times b of them.
            start: place of the first sample in its mini-batch; random numbers of layers depend on a sample's place.
            frozen: see :meth:`__call__`.
            draw: see :meth:`__call__`.
        """
        clients, width = x.shape[:2]

        def wide(leaf: Tensor) -> Tensor:
            return leaf.unsqueeze(1).expand(clients, width, *leaf.shape[1:]).flatten(0, 1)

        def wide_if_stacked(leaf: Any, dim: int | None) -> Any:
            return leaf if dim is None else wide(leaf)

        if key is not None:
            places = torch.arange(start, start + width, device=key.device)
            key = (key[:, None] + places * signed(SECOND)).flatten()
        given = None if frozen is None else map_leaves(wide_if_stacked, frozen, self._frozen_dims)
        drawn = None if draw is None else map_leaves(wide, draw)
        each = {path: wide(leaf) for path, leaf in tensors.items()}
        one_x, one_y = x.flatten(0, 1).unsqueeze(1), y.flatten(0, 1).unsqueeze(1)
        with torch.enable_grad():
            made = self._losses(each, order, key, one_x, one_y, None, given, drawn)
        return [gradient.reshape(clients, width, math.prod(gradient.shape[1:])) for gradient in made]


def _value(
    objective: Sum,
    task: Task,
    tensors: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    mask: Tensor | None,
    frozen: Any,
    draw: Any,
) -> Tensor:
    """Returns terms of an objective as a function of tensors and trees only, as ``vmap`` needs it."""
    return objective(from_leaves(tensors), Batch(x, y, mask), task, frozen, draw)
