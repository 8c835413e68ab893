"""The memory of a local update: parameters, and what the optimizer keeps, as flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from rayfl.engine.flat import Layout
from rayfl.engine.optimizers import OptimizerState, Rule, key_of, rule_of
from rayfl.engine.requests import TrainRequest

MOVED = "moved"
"""The buffer of the parameters."""


class Memory:
    """What a local update moves.

    Args:
        request: the local update.
        layout: of its tree.
        device: where it runs.

    Attributes:
        layout: of the tree.
        flats: buffers by name: the parameters, with what is not moved behind them, and the optimizer's slots.
        tree: the trained tree as views.
        rules: by path, how it is moved.
        steps: by first key of the tree, how many steps were made; scalars.
    """

    def __init__(self, request: TrainRequest, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.flats = {MOVED: layout.pack(request.trainable, device)}
        self.tree = layout.views(self.flats[MOVED])
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
        """Begins one more step."""
        if self._counts:
            for count in self.steps.values():
                count += 1

    def mover(self, paths: Sequence[str]) -> Callable[[Sequence[Tensor]], None]:
        """Returns the function that moves the tensors at some paths along gradients in that order."""
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

    def keep(self) -> None:
        """Hands on what the optimizer keeps, if that is asked for."""
        if self._kept is None:
            return
        slots: dict[str, dict[str, Tensor]] = {}
        for name, flat in self.flats.items():
            if name != MOVED:
                paths = [path for path, rule in self.rules.items() if name in rule.slots]
                # No comprehension where memory is taken: it is a closure, see Operation.
                views = map(self.layout.leaves(flat).__getitem__, paths)
                slots[name] = dict(zip(paths, map(Tensor.clone, views), strict=True))
        self._kept.slots, self._kept.steps = slots, {key: int(count) for key, count in self.steps.items()}


def _move(rows: Sequence[tuple[Rule, Tensor, list[int], list[list[Tensor]]]], gradients: Sequence[Tensor]) -> None:
    for rule, steps, places, (moved, *slots) in rows:
        rule.step(moved, [gradients[place].contiguous() for place in places], slots, steps)
