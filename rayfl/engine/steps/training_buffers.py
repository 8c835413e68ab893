"""The memory of a local update: parameters and optimizer state as flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rayfl.engine.updates.flat import Layout
from rayfl.engine.updates.requests import TrainRequest
from rayfl.optimization.optimizers import OptimizerState, Rule, key_of, rule_of
from rayfl.params import from_leaves, leaves

MOVED = "moved"
"""The buffer of the parameters."""


class TrainingBuffers:
    """The parameters and optimizer state that a local update changes.

    Args:
        request: the local update.
        layout: the layout of its tree.
        device: where it runs.

    Attributes:
        layout: of the tree.
        flats: buffers by name: the parameters, and the optimizer's slots.
        tree: the trained tree: parameters as views, module buffers in memory of their own, because autograd takes a
            forward pass that writes to a tensor for one that writes to all that shares its memory.
        rules: by path, the update rule.
        steps: by first key of the tree, the number of steps taken; scalars.
    """

    def __init__(self, request: TrainRequest, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.flats = {MOVED: layout.pack(request.trainable, device, layout.moving)}
        views = layout.leaves(self.flats[MOVED])
        copied = {path: leaf for path, leaf in leaves(request.trainable) if path not in views}
        own = {path: leaf.to(device).clone(memory_format=torch.contiguous_format) for path, leaf in copied.items()}
        self.tree = from_leaves({path: own[path] if path in own else views[path] for path in layout.paths})
        self.rules = {path: rule_of(path, request.rule, request.groups) for path in layout.moved}
        self._kept = request.optimizer_state
        kept = request.optimizer_state or OptimizerState()
        for name in dict.fromkeys(name for rule in self.rules.values() for name in rule.slots):
            self.flats[name] = layout.zeros(device, layout.moving)
            buffers = layout.leaves(self.flats[name])
            for path in kept.slots.get(name, {}).keys() & self.rules.keys():
                buffers[path].copy_(kept.slots[name][path])
        keys = dict.fromkeys(map(key_of, layout.moved))
        self.steps = {key: torch.tensor(float(kept.steps.get(key, 0)), device=device) for key in keys}
        self._counts = any(rule.counts for rule in self.rules.values())

    def begin(self) -> None:
        """Begins a step: increments the step counts if an optimizer needs them."""
        if self._counts:
            for count in self.steps.values():
                count += 1

    def mover(self, paths: Sequence[str]) -> Callable[[Sequence[Tensor]], None]:
        """Returns a function that updates the tensors at some paths, given their gradients in that order."""
        views = {name: self.layout.leaves(flat) for name, flat in self.flats.items()}
        groups: dict[tuple[Rule, str], list[int]] = {}
        for place, path in enumerate(paths):
            groups.setdefault((self.rules[path], key_of(path)), []).append(place)
        rows = [
            (
                rule,
                self.steps[key],
                own,
                [[views[name][paths[place]] for place in own] for name in (MOVED, *rule.slots)],
            )
            for (rule, key), own in groups.items()
        ]
        return partial(_move, rows)

    def save_optimizer_state(self) -> None:
        """Copies the optimizer's state into the request, if it persists."""
        if self._kept is None:
            return
        slots: dict[str, dict[str, Tensor]] = {}
        for name, flat in self.flats.items():
            if name != MOVED:
                paths = [path for path, rule in self.rules.items() if name in rule.slots]
                # No comprehension around views: it is a closure, see Operation.
                views = map(self.layout.leaves(flat).__getitem__, paths)
                slots[name] = dict(zip(paths, map(Tensor.clone, views), strict=True))
        self._kept.slots, self._kept.steps = slots, {key: int(count) for key, count in self.steps.items()}


def _move(rows: Sequence[tuple[Rule, Tensor, list[int], list[list[Tensor]]]], gradients: Sequence[Tensor]) -> None:
    for rule, steps, places, (moved, *slots) in rows:
        rule.step(moved, [gradients[place].contiguous() for place in places], slots, steps)
