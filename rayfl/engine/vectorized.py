"""Many clients at once: stacked models, ``vmap(grad(objective))``, padded and masked batches.

Clients are sorted by their number of steps. The steps are taken for the first clients of the stack alone, in few
different numbers, so that shapes repeat (:func:`bucket`). A client's model is taken out when it has finished; its place
may be stepped on until the next smaller number suffices.
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
from rayfl.engine.optimizers import Kept, clipped, key_of, rule_of
from rayfl.engine.requests import TrainRequest
from rayfl.engine.tasks import Batch, Task
from rayfl.engine.untouched import Untouched
from rayfl.params import Tree, from_leaves, leaves, map_leaves


def bucket(count: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, ... that is no less: less than half as many more."""
    power = 1 << max(count - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


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
    mover = _Mover(ranked, names, [parameters[i] for i in moved], device)
    frozen, frozen_dims = _stack_frozen(ranked, device)
    lent = Untouched(frozen or {})
    draws = None if first.draws is None else _pad_draws(ranked, device)
    feed = _Feed(ranked, device)
    gradients = vmap(
        grad(_on_tensors(first, task)),
        in_dims=(0, 0, 0, 0 if feed.masks is not None else None, frozen_dims, 0 if draws is not None else None),
    )
    results: list[Tree] = [{} for _ in requests]

    def take_out(ranks: range) -> None:
        for rank in ranks:
            results[order[rank]] = map_leaves(lambda leaf, r=rank: leaf[r].clone(), model)
            mover.take_out(rank)

    unfinished = len(ranked)
    for step in range(first.plan.steps):
        left = feed.active(step)
        take_out(range(left, unfinished))
        unfinished, active = left, min(bucket(left), len(ranked))
        x, y, mask = feed.batch(step, active)
        now = from_leaves({path: leaf[:active] for path, leaf in zip(paths, parameters, strict=True)})
        fixed = None if frozen is None else _first(frozen, frozen_dims, active)
        draw = None if draws is None else map_leaves(lambda leaf, s=step, a=active: leaf[s, :a], draws)
        step_gradients = [leaf for _, leaf in leaves(gradients(now, x, y, mask, fixed, draw))]
        mover.step([step_gradients[i] for i in moved], active)
    check_frozen(lent)
    take_out(range(unfinished))
    mover.keep()
    return results


class _Mover:
    """The optimizer of a stack: its first clients make a step together."""

    def __init__(
        self, ranked: Sequence[TrainRequest], paths: Sequence[str], stacks: Sequence[Tensor], device: torch.device
    ) -> None:
        first = ranked[0]
        self._ranked, self._paths, self._stacks = ranked, paths, stacks
        self._max_norm = first.max_grad_norm
        self._rules = [rule_of(path, first.rule, first.groups) for path in paths]
        kept = first.kept or Kept()
        keys = dict.fromkeys(map(key_of, paths))
        self._counts = {key: torch.tensor(float(kept.steps.get(key, 0)), device=device) for key in keys}
        self._before = {key: kept.steps.get(key, 0) for key in keys}
        self._kept: dict[int, dict[str, dict[str, Tensor]]] = {}
        self._slots = [
            {name: self._begun(name, path, stack) for name in rule.slots}
            for path, rule, stack in zip(paths, self._rules, stacks, strict=True)
        ]
        members: dict[Any, list[int]] = {}
        for place, (path, rule) in enumerate(zip(paths, self._rules, strict=True)):
            members.setdefault((rule, key_of(path)), []).append(place)
        self._members = members

    def _begun(self, name: str, path: str, stack: Tensor) -> Tensor:
        buffer = torch.zeros_like(stack)
        for rank, request in enumerate(self._ranked):
            stored = {} if request.kept is None else request.kept.slots.get(name, {})
            if path in stored:
                buffer[rank].copy_(stored[path])
        return buffer

    def step(self, gradients: list[Tensor], active: int) -> None:
        """One step of the first ``active`` clients."""
        if self._max_norm is not None:
            gradients = clipped(gradients, self._max_norm, stacked=True)
        for count in self._counts.values():
            count += 1
        for (rule, key), places in self._members.items():
            rule.step(
                [self._stacks[i][:active] for i in places],
                [gradients[i].contiguous() for i in places],
                [[self._slots[i][name][:active] for i in places] for name in rule.slots],
                self._counts[key],
            )

    def take_out(self, rank: int) -> None:
        """Notes what the optimizer keeps of a client that has finished."""
        if self._ranked[rank].kept is None:
            return
        names = {name for rule in self._rules for name in rule.slots}
        rows = list(zip(self._paths, self._slots, strict=True))
        self._kept[rank] = {
            name: {path: slots[name][rank].clone() for path, slots in rows if name in slots} for name in names
        }

    def keep(self) -> None:
        """Hands on what was noted.

        Call it last of all: where memory ends before, the requests are as they were, and can be run again.
        """
        for rank, slots in self._kept.items():
            request = self._ranked[rank]
            assert request.kept is not None
            steps = {key: before + request.plan.steps for key, before in self._before.items()}
            request.kept.slots, request.kept.steps = slots, steps


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
            mask[request.plan.steps :, rank] = 1  # who has finished still has a mean, which nobody reads
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
    kind = next(leaf.dtype for _, leaf in leaves(ranked[0].trainable))

    def column(*parts: Any) -> Tensor:
        padded = [np.concatenate([p, np.zeros((steps - len(p), *p.shape[1:]), p.dtype)]) for p in parts]
        return torch.as_tensor(np.stack(padded, axis=1), dtype=kind).to(device)

    return map_leaves(column, *[request.draws or {} for request in ranked])
