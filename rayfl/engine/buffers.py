"""The memory of a local update: parameters, and what the optimizer keeps, as flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rayfl.engine.flat import Layout
from rayfl.engine.optimizers import Kept, Rule, rule_of
from rayfl.engine.requests import TrainRequest
from rayfl.params import Tree


class Buffers:
    """What a local update moves.

    Args:
        request: the local update.
        layout: of its tree.
        device: where it runs.

    Attributes:
        layout: of the tree.
        flat: the parameters, and what is not moved behind them.
        rules: by path, how it is moved.
        slots: by name, what the optimizer keeps.
        counts: by first key of the tree (empty for a tree without entries), how many steps were made.
    """

    def __init__(self, request: TrainRequest, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.flat = layout.pack(request.trainable, device)
        self.rules = {path: rule_of(path, request.rule, request.groups) for path in layout.moved}
        names = {name for rule in self.rules.values() for name in rule.slots}
        self.slots = {name: layout.zeros(device, layout.moving) for name in sorted(names)}
        kept = request.kept or Kept()
        for name, flat in self.slots.items():
            views = layout.leaves(flat)
            for path, stored in kept.slots.get(name, {}).items():
                views[path].copy_(stored)
        keys = dict.fromkeys(map(key_of, layout.moved))
        self.counts = {key: torch.tensor(float(kept.counts.get(key, 0)), device=device) for key in keys}

    def tree(self) -> Tree:
        """The trained tree as views."""
        return self.layout.views(self.flat)

    def advance(self) -> None:
        """One more step begins."""
        for count in self.counts.values():
            count += 1

    def mover(self) -> Callable[[Sequence[Tensor]], None]:
        """Takes contiguous gradients of all that is moved, in the order of ``layout.moved``, and makes a step."""
        tensors = [self.layout.leaves(self.flat)[path] for path in self.layout.moved]
        kept = {name: self.layout.leaves(flat) for name, flat in self.slots.items()}
        members: dict[tuple[Rule, str], list[int]] = {}
        for number, path in enumerate(self.layout.moved):
            members.setdefault((self.rules[path], key_of(path)), []).append(number)
        parts = [
            (
                rule,
                numbers,
                [tensors[number] for number in numbers],
                [[kept[name][self.layout.moved[number]] for number in numbers] for name in rule.slots],
                self.counts[key],
            )
            for (rule, key), numbers in members.items()
        ]

        def move(gradients: Sequence[Tensor]) -> None:
            for rule, numbers, moved, slots, count in parts:
                rule.step(moved, [gradients[number] for number in numbers], slots, count)

        return move

    def keep(self, request: TrainRequest) -> None:
        """Hands on what the optimizer keeps."""
        if request.kept is not None:
            views = {name: self.layout.leaves(flat) for name, flat in self.slots.items()}
            request.kept.slots = {
                name: {p: v.clone() for p, v in found.items() if v.numel()} for name, found in views.items()
            }
            request.kept.counts = {key: int(count) for key, count in self.counts.items()}


def key_of(path: str) -> str:
    """The first key of a path in the trained tree; empty for a tree without entries."""
    key, mark, _ = path.partition("/")
    return key if mark else ""
