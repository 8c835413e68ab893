"""Classifiers at several depths of a network, and how deep a client's part of it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from algorithms.parts.layers import draw_linear, linear
from algorithms.parts.requirements import check_cut_by_depth, check_head
from rayfl.errors import ConfigError
from rayfl.models.depths import Depths, Stage
from rayfl.params import Tree
from rayfl.tasks.base import Model, Predictor, Task

Parts = dict[str, Tree]
"""Two flat trees: ``model``, tensors of the network, and ``exits``, those of the classifiers before the last one."""


class Exits:
    """A network with classifiers after some of its stages, the last of them its own.

    Depth i of D has the stages up to ceil(i S / D) of S, and the first i classifiers. A classifier before the last is a
    linear layer that reads what the stage computes, of maps the mean over their pixels.

    Args:
        network: a network with stages (:attr:`rayfl.models.base.Network.depths`).
        count: D.
    """

    def __init__(self, network: Any, count: int) -> None:
        self._network, self.count = network, count
        self._depths: Depths = network.depths
        stages = len(self._depths.stages)
        self._after = [-(-number * stages // count) - 1 for number in range(1, count + 1)]

    def between(self, depth: int, deeper: int) -> tuple[Stage, ...]:
        """The stages from the last of a depth to the last of another that is as deep or deeper."""
        return self._depths.stages[self._after[depth - 1] : self._after[deeper - 1] + 1]

    @property
    def read(self) -> list[Stage]:
        """The stages that the classifiers before the last one read."""
        return [self._depths.stages[after] for after in self._after[:-1]]

    @cached_property
    def _level(self) -> dict[str, int]:
        return {
            name: next(i for i, last in enumerate(self._after, 1) if place <= last)
            for place, stage in enumerate(self._depths.stages)
            for name in stage.names
        }

    def drawn(self, like: Tensor, generator: np.random.Generator) -> Tree:
        """The classifiers before the last, drawn as PyTorch draws linear layers: ``exits``."""
        found: Tree = {}
        for number, stage in enumerate(self.read, 1):
            layer = draw_linear(stage.width, self._network.head_shape[0], like, generator)
            found |= {f"{number}.{name}": leaf for name, leaf in layer.items()}
        return found

    def levels(self, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
        """The least depth that has a tensor, by its name."""
        return {
            "model": {name: self._level.get(name, self.count) for name in parts["model"]},
            "exits": {name: int(name.partition(".")[0]) for name in parts["exits"]},
        }

    def cut(self, parts: Mapping[str, Tree], depth: int) -> Parts:
        """The network and its classifiers up to a depth."""
        return {
            part: {name: parts[part][name] for name, level in levels.items() if level <= depth}
            for part, levels in self.levels(parts).items()
        }

    def merged(
        self, old: Mapping[str, Tree], means: Mapping[int, Mapping[str, Tree]], weights: Mapping[int, float]
    ) -> Parts:
        """The mean of each tensor over the clients that have it; the old value where nobody has.

        Args:
            old: the whole network, with its classifiers.
            means: by depth, the mean of what the clients of that depth have.
            weights: by depth, the sum of their weights.
        """

        def mean(part: str, name: str, level: int) -> Tensor:
            having = [depth for depth in means if depth >= level]
            own = [means[depth][part][name] for depth in having]
            return mean_of_holders(old[part][name], own, [weights[depth] for depth in having])

        levels = self.levels(old)
        return {part: {n: mean(part, n, level) for n, level in tree.items()} for part, tree in levels.items()}

    def logits(
        self,
        parts: Mapping[str, Mapping[str, Tensor]],
        x: Tensor,
        training: bool = False,
        mask: Tensor | None = None,
    ) -> list[Tensor]:
        """The outputs of all classifiers of a part of the network, shape (b, C) each, from the first.

        Args:
            parts: of any depth.
            x: inputs, shape (b, *input shape).
            training: see :meth:`rayfl.models.base.Network.logits`, also for ``mask``.
            mask: of the padding.
        """
        whole, exits = self._network.head_weight in parts["model"], parts["exits"]
        numbers = sorted({int(name.partition(".")[0]) for name in exits})
        walk = partial(self._depths.read, exits=[self._after[number - 1] for number in numbers], whole=whole)
        read = self._network.walked(parts["model"], x, walk, training=training, mask=mask)
        layers = [{name: exits[f"{number}.{name}"] for name in ("matrix", "offset")} for number in numbers]
        return [*map(linear, layers, read), *read[len(numbers) :]]


def mean_of_holders(old: Tensor, own: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean of a tensor over those who have it; the old value where nobody has.

    Args:
        old: before.
        own: of each that has it. Of one alone it is taken to the bit.
        weights: of any sum.
    """
    if len(own) < 2:
        return own[0] if own else old
    total = math.fsum(weights)
    rows = [one.double() * (weight / total) for one, weight in zip(own, weights, strict=True)]
    return torch.stack(rows).sum(0).to(old.dtype)


def classified(parts: Parts, count: int, place: int) -> Predictor:
    """What one of the classifiers of a part of a network predicts.

    Args:
        parts: of any depth.
        count: D.
        place: of the classifier among those that the part has.
    """

    def predictions(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
        model, exits = models
        found: Tensor = task.predicted(Exits(task.network, count).logits({"model": model, "exits": exits}, x)[place])
        return found

    return Predictor.of(parts["model"], parts["exits"], combine=predictions)


def parts_of(tree: Mapping[str, Any]) -> Parts:
    """The network and the classifiers before its own, of a tree in which one of the two may be missing."""
    return {part: tree.get(part, {}) for part in ("model", "exits")}


def depth_count(task: Task, classifiers: int | None) -> int:
    """D: into how many depths a network is cut.

    Args:
        task: has the network.
        classifiers: as configured; None: 4, or as many as the network has stages if these are fewer.
    """
    network: Any = task.network
    return min(4, len(network.depths.stages)) if classifiers is None else classifiers


def check_depths(method: str, task: Task, classifiers: int | None, depths: Sequence[int] | None) -> None:
    """Refuses a network that cannot be cut into so many depths.

    Args:
        method: its name.
        task: has the network.
        classifiers: as for :func:`depth_count`.
        depths: that clients have; None: all of them.

    Raises:
        ConfigError: naming what is in the way, and the fix.
    """
    check_head(method, task.network)
    stages = check_cut_by_depth(method, task.network)
    if classifiers is not None and classifiers > stages:
        raise ConfigError(
            f"algorithm.classifiers={classifiers}: this model can be cut into {stages} depths at most: set it to "
            f"{stages} or less, or choose a deeper model"
        )
    count = depth_count(task, classifiers)
    if depths is not None and max(depths) > count:
        raise ConfigError(
            f"algorithm.depths has {max(depths)}, and there are {count} depths (algorithm.classifiers): name depths "
            f"from 1 to {count}"
        )
