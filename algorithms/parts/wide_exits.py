"""Networks with classifiers at several depths, cut by depth and by width at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from algorithms.parts.exits import Exits, Parts
from algorithms.parts.widths import Held, cut, merged, padded, weights_by_element, window
from rayfl.models.units import Axis, Units
from rayfl.params import Tree


class WideExits:
    """A network with classifiers whose parts have the first stages, and of each hidden layer the first units.

    A classifier before the last reads the units of its stage, so that it is cut with them.

    Args:
        network: a network with stages and units.
        count: D, into how many depths it is cut.

    Attributes:
        exits: the cut by depth alone.
    """

    def __init__(self, network: Any, count: int) -> None:
        self.exits = Exits(network, count)
        units: Units = network.units
        axes: dict[str, tuple[Axis | None, Axis | None]] = {}
        for number, stage in enumerate(self.exits.read, 1):
            last = [name for name in stage.names if name in units.axes][-1]
            axes |= {f"{number}.matrix": (None, units.axes[last][0]), f"{number}.offset": (None, None)}
        self._units = {"model": units, "exits": replace(units, axes=axes, outputs=frozenset())}

    def held(self, width: float) -> Held:
        """The first units of each hidden layer, as many as a width is."""
        return window(self._units["model"], width)

    def cut(self, parts: Mapping[str, Tree], depth: int, width: float) -> Parts:
        """The stages and classifiers up to a depth, with the first units alone."""
        held = self.held(width)
        return {part: cut(tree, held, self._units[part]) for part, tree in self.exits.cut(parts, depth).items()}

    def padded(self, parts: Mapping[str, Tree], width: float) -> Parts:
        """A part of some depth with zeros for the units that it lacks, which have no gradient."""
        held = self.held(width)
        return {part: padded(tree, held, self._units[part]) for part, tree in parts.items()}

    def merged(
        self,
        old: Mapping[str, Tree],
        means: Mapping[int, Mapping[str, Tree]],
        weights: Mapping[int, float],
        sizes: Sequence[tuple[int, float]],
    ) -> Parts:
        """The mean of each element over the clients that have it; the old value where nobody has.

        Args:
            old: the whole network, with its classifiers.
            means: by level, the mean of what its clients have.
            weights: by level, the sum of the weights of its clients.
            sizes: depth and width, by level.
        """
        found: Parts = {}
        for part, levels in self.exits.levels(old).items():
            found[part] = {}
            for name, least in levels.items():
                having = [level for level in means if sizes[level][0] >= least]
                held = [self.held(sizes[level][1]) for level in having]
                own = {level: means[level][part][name] for level in having}
                found[part][name] = self._mean(part, name, old[part][name], own, held, [weights[at] for at in having])
        return found

    def _mean(
        self,
        part: str,
        name: str,
        old: Tensor,
        own: Mapping[int, Tensor],
        held: Sequence[Held],
        weights: Sequence[float],
    ) -> Tensor:
        """Of one tensor, over the levels that have some of it, with their units and weights."""
        if not own:
            return old
        units, total = self._units[part], math.fsum(weights)
        rows = [padded({name: leaf}, one, units)[name] for leaf, one in zip(own.values(), held, strict=True)]
        mean = rows[0]
        if len(rows) > 1:
            mean = torch.stack([row.double() * (q / total) for row, q in zip(rows, weights, strict=True)]).sum(0)
        having = weights_by_element(held, weights, units, {name: old})
        found: Tensor = merged({name: old}, {name: mean}, having, total)[name]
        return found

    def scaled(self, parts: Mapping[str, Mapping[str, Tensor]], factor: float | Tensor) -> dict[str, dict[str, Tensor]]:
        """A network in which the outputs of hidden linear layers and convolutions are multiplied by a factor."""
        outputs = self._units["model"].outputs
        model = {name: leaf * factor if name in outputs else leaf for name, leaf in parts["model"].items()}
        return {"model": model, "exits": dict(parts["exits"])}
