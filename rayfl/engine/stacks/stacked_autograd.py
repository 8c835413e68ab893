"""Stacked steps by autograd: the gradient of the sum of ``vmap(objective)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfl.engine.gradients.example_gradients import ExampleGradients
from rayfl.engine.gradients.stacked_gradients import Loss, StackedGradients
from rayfl.engine.stacks.compiled_steps import CompiledStep, Compiler
from rayfl.engine.steps.looped import moved_paths, step_keys
from rayfl.engine.updates.feed import of_step
from rayfl.engine.updates.requests import TrainRequest
from rayfl.engine.updates.write_guard import WriteGuard
from rayfl.optimization.optimizers import OptimizerState, clipped, key_of, rule_of
from rayfl.params import Tree, copies, from_leaves, leaves, map_leaves
from rayfl.tasks.base import Batch, Task, recorded_names


class StackedAutograd:
    """Steps of a stack on any objective, differentiated by autograd.

    Args:
        ranked: the clients, those with most steps first.
        task: what is learned.
        device: where to compute.
        compiler: compiles the steps; None: eager steps.
    """

    phase = 0

    def __init__(
        self, ranked: Sequence[TrainRequest], task: Task, device: torch.device, compiler: Compiler | None = None
    ) -> None:
        first = ranked[0]
        self._paths = [path for path, _ in leaves(first.trainable)]
        self._model = _stack([request.trainable for request in ranked], device)
        self._parameters = dict(leaves(self._model))
        self._rows = map_leaves(torch.unbind, self._model)
        self._moved = moved_paths(self._model, task)
        self._mover = _Mover(ranked, self._moved, [self._parameters[path] for path in self._moved], device)
        self._frozen, self._frozen_dims = _stack_frozen(ranked, device)
        self.lent = WriteGuard(self._frozen or {}, recorded_names(task))
        self._draws = None if first.draws is None else _pad_draws(ranked, device)
        self._keys = step_keys(ranked, first.plan.steps, task, device)
        dims = (self._frozen_dims, None if self._draws is None else 0)
        self._gradients = StackedGradients(_on_tensors(first, task), task, dims)
        self._private = None
        if first.private is not None:
            self._private = ExampleGradients(ranked, task, self._frozen_dims, device)
        self._compiled = None
        if compiler is not None and self._private is None:
            how = self._gradients, self._moved, self._mover.rules, first.max_grad_norm, self._frozen_dims, device
            self._compiled = CompiledStep(compiler, first.objective, task, *how)

    def step(self, number: int | Tensor, active: int, x: Tensor, y: Tensor, mask: Tensor | None) -> None:
        """Updates the first ``active`` clients by a step on one mini-batch each."""
        now = {path: leaf[:active] for path, leaf in self._parameters.items()}
        fixed = None if self._frozen is None else _first(self._frozen, self._frozen_dims, active)
        draw = None if self._draws is None else map_leaves(lambda leaf: of_step(leaf, number, active), self._draws)
        key = None if self._keys is None else of_step(self._keys, number, active)
        if self._private is not None:
            gradients = self._private(number, now, self._moved, x, y, mask, fixed, draw)
        elif self._compiled is None:
            gradients = None
        else:
            given = {"model": from_leaves(now), "x": x, "y": y, "mask": mask, "key": key, "frozen": fixed, "draw": draw}
            there = {name: value for name, value in given.items() if value is not None}
            gradients = self._compiled(there, self._mover.slots(active))
            if gradients == []:
                return
        if gradients is None:
            gradients = self._gradients(now, self._moved, key, x, y, mask, fixed, draw)
        with torch.no_grad():
            self._mover.step(gradients, active)

    def models_of(self, start: int, stop: int) -> list[Tree]:
        """Returns the trained trees of some clients, by rank, in new memory."""
        stacks = [rows for _, rows in leaves(self._rows)]
        own = iter(copies([rows[rank] for rank in range(start, stop) for rows in stacks]))
        return [map_leaves(lambda _: next(own), self._model) for _ in range(start, stop)]

    def slots_of(self, rank: int) -> dict[str, dict[str, Tensor]]:
        """Returns one client's optimizer state by slot and path, in new memory."""
        return self._mover.slots_of(rank)


class _Mover:
    """The optimizer of a stack.

    Attributes:
        rules: update rules, in the order of the trained paths.
    """

    def __init__(
        self, ranked: Sequence[TrainRequest], paths: Sequence[str], stacks: Sequence[Tensor], device: torch.device
    ) -> None:
        first = ranked[0]
        self._ranked, self._paths, self._stacks = ranked, paths, stacks
        self._max_norm = first.max_grad_norm
        self.rules = [rule_of(path, first.rule, first.groups) for path in paths]
        kept = first.optimizer_state or OptimizerState()
        keys = dict.fromkeys(map(key_of, paths))
        self._counts = {key: torch.tensor(float(kept.steps.get(key, 0)), device=device) for key in keys}
        self._slots = [
            {name: self._begun(name, path, stack) for name in rule.slots}
            for path, rule, stack in zip(paths, self.rules, stacks, strict=True)
        ]
        members: dict[Any, list[int]] = {}
        for place, (path, rule) in enumerate(zip(paths, self.rules, strict=True)):
            members.setdefault((rule, key_of(path)), []).append(place)
        self._members = members

    def _begun(self, name: str, path: str, stack: Tensor) -> Tensor:
        buffer = torch.zeros_like(stack)
        for rank, request in enumerate(self._ranked):
            stored = {} if request.optimizer_state is None else request.optimizer_state.slots.get(name, {})
            if path in stored:
                buffer[rank].copy_(stored[path])
        return buffer

    def step(self, gradients: list[Tensor], active: int) -> None:
        """Takes one optimizer step for the first ``active`` clients."""
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

    def slots(self, active: int) -> list[dict[str, Tensor]]:
        """Returns the optimizer state of the first ``active`` clients, for each trained tensor."""
        return [{name: buffer[:active] for name, buffer in own.items()} for own in self._slots]

    def slots_of(self, rank: int) -> dict[str, dict[str, Tensor]]:
        """Returns one client's optimizer state, by slot and path."""
        names = {name for rule in self.rules for name in rule.slots}
        rows = list(zip(self._paths, self._slots, strict=True))
        return {name: {path: slots[name][rank].clone() for path, slots in rows if name in slots} for name in names}


def _on_tensors(request: TrainRequest, task: Task) -> Loss:
    """Returns the objective as a function of tensors and trees only, as ``vmap`` needs it."""

    def loss(
        tensors: Mapping[str, Tensor], x: Tensor, y: Tensor, mask: Tensor | None, frozen: Any, draw: Any
    ) -> Tensor:
        return request.objective(from_leaves(tensors), Batch(x, y, mask), task, frozen, draw)

    return loss


def _stack(trees: Sequence[Mapping[str, Any]], device: torch.device) -> Tree:
    return map_leaves(lambda *tensors: torch.stack([t.to(device) for t in tensors]), *trees)


def _stack_frozen(ranked: Sequence[TrainRequest], device: torch.device) -> tuple[Any, Any]:
    """Stacks tensors that differ between clients; those they share (the broadcast model) stay unstacked."""
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
    """Returns the draws as (steps, clients, ...), padded; entries of finished clients are never read."""
    steps = ranked[0].plan.steps
    kind = next(leaf.dtype for _, leaf in leaves(ranked[0].trainable))

    def column(*parts: Any) -> Tensor:
        padded = [np.concatenate([p, np.zeros((steps - len(p), *p.shape[1:]), p.dtype)]) for p in parts]
        return torch.as_tensor(np.stack(padded, axis=1), dtype=kind).to(device)

    return map_leaves(column, *[request.draws or {} for request in ranked])
