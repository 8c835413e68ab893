"""Many clients at once: stacked models, ``vmap(grad(objective))``, padded and masked batches.

Clients are sorted by their number of steps; one that has finished leaves the stack, so the work is that of
the steps actually taken, up to the padding of partial batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from rayfl.engine.looped import check_frozen, moved_paths
from rayfl.engine.requests import TrainRequest
from rayfl.engine.sgd import SGD
from rayfl.params import Tree, from_leaves, leaves, map_leaves
from rayfl.tasks import Batch, Task
from rayfl.untouched import Untouched


def train(requests: Sequence[TrainRequest], task: Task, device: torch.device) -> list[Tree]:
    """Runs the local updates of one group (equal ``TrainRequest.group()``); results in the order given."""
    order = sorted(range(len(requests)), key=lambda i: -requests[i].plan.steps)
    ranked = [requests[i] for i in order]
    first = ranked[0]
    paths = [path for path, _ in leaves(first.trainable)]
    model = _stack([request.trainable for request in ranked], device)
    parameters = [leaf for _, leaf in leaves(model)]
    names = moved_paths(model, task)
    moved = [i for i, path in enumerate(paths) if path in names]
    sgd = SGD(first, names)
    velocity = _stacked_velocity(ranked, names, [parameters[i] for i in moved]) if sgd.has_momentum else []
    frozen, frozen_dims = _stack_frozen(ranked, device)
    lent = Untouched(frozen or {})
    draws = None if first.draws is None else _pad_draws(ranked, device)
    feed = _Feed(ranked, device)
    gradients = vmap(
        grad(_on_tensors(first, task)),
        in_dims=(0, 0, 0, 0 if feed.masks is not None else None, frozen_dims, 0 if draws is not None else None),
    )
    for step in range(first.plan.steps):
        active = feed.active(step)
        x, y, mask = feed.batch(step, active)
        now = from_leaves({path: leaf[:active] for path, leaf in zip(paths, parameters, strict=True)})
        fixed = None if frozen is None else _first(frozen, frozen_dims, active)
        draw = None if draws is None else map_leaves(lambda leaf, s=step, a=active: leaf[s, :a], draws)
        step_gradients = [leaf for _, leaf in leaves(gradients(now, x, y, mask, fixed, draw))]
        sgd.step(
            [parameters[i][:active] for i in moved],
            [step_gradients[i] for i in moved],
            [v[:active] for v in velocity],
            stacked=True,
        )
    check_frozen(lent)
    results: list[Tree] = [{} for _ in requests]
    momenta: list[dict[str, Tensor]] = []
    for rank, position in enumerate(order):
        results[position] = map_leaves(lambda leaf, r=rank: leaf[r].clone(), model)
        kept = ranked[rank].velocity is not None and bool(velocity)
        momenta.append({path: v[rank].clone() for path, v in zip(names, velocity, strict=True)} if kept else {})
    # Last of all: where memory ends before, the requests are as they were, and can be run again.
    for request, buffers in zip(ranked, momenta, strict=True):
        if request.velocity is not None:
            request.velocity.update(buffers)
    return results


def _stacked_velocity(ranked: Sequence[TrainRequest], paths: list[str], stacks: list[Tensor]) -> list[Tensor]:
    """The momentum buffers before the first step: those the requests bring, zeros for the rest."""
    velocity = [torch.zeros_like(stack) for stack in stacks]
    for rank, request in enumerate(ranked):
        kept = request.velocity or {}
        for path, buffer in zip(paths, velocity, strict=True):
            if path in kept:
                buffer[rank].copy_(kept[path])
    return velocity


def _on_tensors(request: TrainRequest, task: Task) -> Callable[..., Tensor]:
    """The objective as a function of tensors and trees alone, as ``vmap`` needs it."""

    def loss(model: Tree, x: Tensor, y: Tensor, mask: Tensor | None, frozen: Any, draw: Any) -> Tensor:
        return request.objective(model, Batch(x, y, mask), task, frozen, draw)

    return loss


class _Feed:
    """Batches of all clients, gathered from one concatenated tensor per step."""

    def __init__(self, ranked: Sequence[TrainRequest], device: torch.device) -> None:
        self._x = torch.cat([request.examples.x for request in ranked])
        self._y = torch.cat([request.examples.y for request in ranked])
        steps = [request.plan.steps for request in ranked]
        sizes = {stop - start for bounds in {one.plan.bounds for one in ranked} for start, stop in pairwise(bounds)}
        width = max(sizes, default=0)
        index = torch.zeros(max(steps), len(ranked), width, dtype=torch.int64)
        mask = torch.zeros(max(steps), len(ranked), width, dtype=self._float_type(ranked[0]))
        first = ranked[0].variations
        self._augmentation = None if first is None else first.augmentation
        drawn = (
            {} if first is None else {name: v.new_zeros(*index.shape, *v.shape[1:]) for name, v in first.drawn.items()}
        )
        offset = 0
        for rank, request in enumerate(ranked):
            # padding repeats the client's first sample: finite values that the mask removes
            index[:, rank] = offset
            step, place = _slots(request.plan.bounds)
            index[step, rank, place] = request.plan.order + offset
            mask[step, rank, place] = 1
            for name, values in drawn.items():
                assert request.variations is not None
                values[step, rank, place] = request.variations.drawn[name]
            offset += len(request.examples)
        self._steps = steps
        self._index = index.to(device)
        self.masks = None if len(sizes) <= 1 else mask.to(device)
        self._drawn = {name: values.to(device) for name, values in drawn.items()}

    @staticmethod
    def _float_type(request: TrainRequest) -> torch.dtype:
        kind: torch.dtype = next(leaf.dtype for _, leaf in leaves(request.trainable))
        return kind

    def active(self, step: int) -> int:
        """How many of the ranked clients still have a step to do."""
        return sum(1 for steps in self._steps if steps > step)

    def batch(self, step: int, active: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """x (active, b, *shape), y (active, b), mask (active, b) or None."""
        index = self._index[step, :active]
        x = self._x[index]
        if self._augmentation is not None:
            drawn = {name: values[step, :active].flatten(0, 1) for name, values in self._drawn.items()}
            x = self._augmentation(x.flatten(0, 1), drawn).view(x.shape)
        return x, self._y[index], None if self.masks is None else self.masks[step, :active]


@lru_cache
def _slots(bounds: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The step of each sample of a plan, and its place in the mini-batch; clients of one size have the same."""
    sizes = np.diff(bounds)
    steps = np.repeat(np.arange(len(sizes)), sizes)
    return torch.from_numpy(steps), torch.from_numpy(np.arange(len(steps)) - np.asarray(bounds)[steps])


def _stack(trees: Sequence[Mapping[str, Any]], device: torch.device) -> Tree:
    return map_leaves(lambda *tensors: torch.stack([t.to(device) for t in tensors]), *trees)


def _stack_frozen(ranked: Sequence[TrainRequest], device: torch.device) -> tuple[Any, Any]:
    """Stacks what differs between clients; what they share (the broadcast model) stays one tensor."""
    if ranked[0].frozen is None:
        return None, None
    values: dict[str, Any] = {}
    dims: dict[str, Any] = {}
    rows = [dict(leaves(request.frozen or {})) for request in ranked]
    for path, leaf in rows[0].items():
        column = [row[path] for row in rows]
        if not isinstance(leaf, Tensor):
            values[path], dims[path] = leaf, None
        elif all(other is leaf for other in column):
            values[path], dims[path] = leaf.to(device), None
        else:
            values[path], dims[path] = torch.stack([t.to(device) for t in column]), 0
    return from_leaves(values), from_leaves(dims)


def _first(tree: Tree, dims: Tree, active: int) -> Tree:
    return map_leaves(lambda leaf, dim: leaf if dim is None else leaf[:active], tree, dims)


def _pad_draws(ranked: Sequence[TrainRequest], device: torch.device) -> Tree:
    """Draws as (steps, clients, ...); entries of finished clients are never read."""
    steps = ranked[0].plan.steps

    def column(*parts: Tensor) -> Tensor:
        padded = [torch.cat([p, p.new_zeros(steps - p.shape[0], *p.shape[1:])]) for p in parts]
        return torch.stack(padded, dim=1).to(device)

    return map_leaves(column, *[request.draws or {} for request in ranked])
