"""Which dimensions of a network's parameters are hidden units, so that a part of the units can be cut out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfl.errors import ModelError
from rayfl.models.layers.factors import Factorized
from rayfl.models.traced import ADD, CONVOLUTIONS, POOLS, SINGLE, Preparation, flattens, layer_of, name_of, traced


@dataclass(frozen=True)
class Axis:
    """A dimension of a parameter whose entries belong to hidden units.

    Attributes:
        layer: whose units, a place in :attr:`Units.sizes`.
        block: how many consecutive entries belong to one unit.
    """

    layer: int
    block: int


@dataclass(frozen=True)
class Units:
    """The hidden units of a network.

    A unit is a row of a linear layer or a channel of a convolution. Channels that group normalization normalizes
    together are one unit. Layers whose outputs are added have the same units.

    Attributes:
        sizes: how many units there are, by layer.
        axes: for every parameter its first two dimensions, in the network's order; None for a dimension that is no
            hidden layer's: inputs, classes, kernels.
        outputs: names of the parameters of those linear layers and convolutions whose outputs are units.
    """

    sizes: tuple[int, ...]
    axes: Mapping[str, tuple[Axis | None, Axis | None]]
    outputs: frozenset[str]


def units_of(model: nn.Module, trained: Sequence[str]) -> Units:
    """Finds the hidden units of a network.

    Args:
        model: on the CPU, in evaluation mode. Only its structure is read.
        trained: names of the parameters that are trained, in the network's order.

    Returns:
        Units which, if all their parameters are 0, neither change an output nor have a gradient.

    Raises:
        ModelError: naming the layer or function with which that is not so, or of which it is not known.
    """
    if factors := [name for name, module in model.named_modules() if isinstance(module, Factorized)]:
        raise ModelError(f"{factors[0]!r} has factors (model.factorize), whose rows are no units")
    return _Reader(model, trained).read(traced(model))


@dataclass(frozen=True)
class _Value:
    """What is known of a tensor: whose units its channels are (None: nobody's), and its layout."""

    layer: int | None
    layout: str  # inputs; maps (b, channels, ...); rows (b, units); flattened maps (b, channels * pixels)


class _Reader:
    """Follows a network from its inputs to its outputs.

    Layers are numbered as they come; those whose outputs are added become one (``self._same``).
    """

    def __init__(self, model: nn.Module, trained: Sequence[str]) -> None:
        self._model = model
        self._trained = trained
        self._same: list[int] = []
        self._channels: list[int] = []
        self._together: list[int] = []  # consecutive channels that cannot be separated
        self._whole: set[int] = set()
        self._axes: dict[str, tuple[tuple[int | None, int], ...]] = {}  # layer, and the dimension's length
        self._outputs: list[str] = []

    def read(self, graph: fx.Graph) -> Units:
        values: dict[fx.Node, _Value] = {}
        for node in graph.nodes:
            if node.op == "output":
                self._end(values.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None)
            else:
                values[node] = self._value(node, values)
        if missing := [name for name in self._trained if name not in self._axes]:
            raise ModelError(f"{missing[0]!r} is of no layer that can be cut by width")
        return self._found()

    def _value(self, node: fx.Node, values: Mapping[fx.Node, _Value]) -> _Value:
        if node.op == "placeholder":
            return _Value(None, "inputs")
        given = [values[one] for one in node.args if isinstance(one, fx.Node) and one in values]
        module, kind = layer_of(self._model, node)
        if not given or node.op == "get_attr":
            raise self._unknown(node, module)
        first = given[0]
        if kind in SINGLE or isinstance(module, Preparation):
            return first
        if kind in POOLS and first.layout in ("inputs", "maps"):
            return first
        if kind in ADD and len(given) == 2 and given[0].layout == given[1].layout:
            return self._added(*given)
        if flattens(node, module) and first.layout != "flattened":
            return replace(first, layout={"maps": "flattened"}.get(first.layout, first.layout))
        if module is not None and (found := self._layer(str(node.target), module, first)) is not None:
            return found
        raise self._unknown(node, module)

    def _layer(self, name: str, module: nn.Module, given: _Value) -> _Value | None:
        """What a layer with parameters makes of a value; None for a layer that is not known."""
        if type(module) is nn.Linear and given.layout != "maps":
            return self._weighing(name, module.weight, module.bias, given, "rows")
        if type(module) in CONVOLUTIONS and given.layout in ("inputs", "maps"):
            groups: Any = module.groups
            if groups == 1:
                weight: Any = module.weight
                return self._weighing(name, weight, module.bias, given, "maps")
        if isinstance(module, _BatchNorm) and given.layout in ("maps", "rows"):
            if module.track_running_stats:
                raise ModelError(
                    f"{name!r} keeps running statistics, which are those of one width: set model.norm=group, "
                    "model.norm=batch_no_stats or model.norm=none, where the model offers these"
                )
            return self._norm(name, module, given, 1)
        if type(module) is nn.GroupNorm and given.layout == "maps":
            return self._norm(name, module, given, module.num_channels // module.num_groups)
        return None

    def _weighing(self, name: str, weight: Any, bias: Any, given: _Value, layout: str) -> _Value:
        """A linear layer or a convolution."""
        if given.layer is not None:
            channels = self._channels[self._root(given.layer)]
            if weight.shape[1] % channels if given.layout == "flattened" else weight.shape[1] != channels:
                raise ModelError(f"{name!r} reads {weight.shape[1]} numbers of {channels} units in an unknown order")
        layer = len(self._same)
        self._same.append(layer)
        self._channels.append(weight.shape[0])
        self._together.append(1)
        self._note(f"{name}.weight", (layer, weight.shape[0]), (given.layer, weight.shape[1]))
        if bias is not None:
            self._note(f"{name}.bias", (layer, weight.shape[0]), (None, 1))
        self._outputs += [f"{name}.weight"] + ([f"{name}.bias"] if bias is not None else [])
        return _Value(layer, layout)

    def _norm(self, name: str, module: Any, given: _Value, together: int) -> _Value:
        """A normalization of channels, or of groups of them."""
        if module.weight is not None:
            length = module.weight.shape[0]
            self._note(f"{name}.weight", (given.layer, length), (None, 1))
            self._note(f"{name}.bias", (given.layer, length), (None, 1))
        elif given.layer is not None:
            raise ModelError(f"{name!r} has no scale that could be 0 for channels that a client does not have")
        if given.layer is not None:
            root = self._root(given.layer)
            self._together[root] = math.lcm(self._together[root], together)
        return given

    def _note(self, name: str, *dimensions: tuple[int | None, int]) -> None:
        if name in self._axes:
            raise ModelError(f"{name!r} is used twice, so that it is not of one layer alone")
        if name not in self._trained:
            raise ModelError(f"{name!r} is not trained (requires_grad=False), so that it cannot be 0 for some clients")
        self._axes[name] = dimensions

    def _added(self, one: _Value, other: _Value) -> _Value:
        """The sum of two values, whose channels are the same units."""
        if one.layer is None or other.layer is None:
            self._whole.update(self._root(value.layer) for value in (one, other) if value.layer is not None)
            return replace(one, layer=None)
        left, right = self._root(one.layer), self._root(other.layer)
        if self._channels[left] != self._channels[right]:
            raise ModelError("two maps of unlike numbers of channels are added")
        self._same[right] = left
        self._together[left] = math.lcm(self._together[left], self._together[right])
        if right in self._whole:
            self._whole.add(left)
        return one

    def _end(self, value: _Value | None) -> None:
        if value is None or value.layout != "rows":
            raise ModelError("its outputs are not those of one linear layer")
        if value.layer is not None:
            self._whole.add(self._root(value.layer))

    def _root(self, layer: int) -> int:
        while self._same[layer] != layer:
            layer = self._same[layer]
        return layer

    def _found(self) -> Units:
        whole = {self._root(layer) for layer in self._whole}
        roots = sorted({self._root(layer) for layer in self._same} - whole)
        sizes = [self._channels[root] // self._together[root] for root in roots]

        def axis(layer: int | None, length: int) -> Axis | None:
            if layer is None or (root := self._root(layer)) in whole:
                return None
            place = roots.index(root)
            return Axis(place, length // sizes[place])

        axes = {name: (axis(*self._axes[name][0]), axis(*self._axes[name][1])) for name in self._trained}
        return Units(tuple(sizes), axes, frozenset(name for name in self._outputs if axes[name][0] is not None))

    def _unknown(self, node: fx.Node, module: nn.Module | None) -> ModelError:
        return ModelError(f"with {name_of(node, module)} it is not known which numbers are those of a unit")
