"""Where a network can be cut by depth: its stages, after each of which all that follows reads one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from rayfl.errors import ModelError
from rayfl.models.anatomy import under
from rayfl.models.traced import ADD, CONVOLUTIONS, POOLS, SINGLE, Preparation, flattens, layer_of, name_of, traced


@dataclass(frozen=True)
class Stage:
    """Consecutive layers of a network.

    Attributes:
        names: their parameters and buffers.
        width: how many numbers of a sample a classifier after them reads: units, or channels of a map, whose pixels are
            averaged.
        end: what they compute, by its name in the graph.
    """

    names: tuple[str, ...]
    width: int
    end: str


@dataclass(frozen=True)
class _Value:
    """What is known of a tensor: its layout, maps (b, channels, ...), rows (b, units) or vectors of flattened maps."""

    layout: str
    width: int


class Depths:
    """A network of linear layers, convolutions and normalization as stages, and how to run the first of them.

    A stage begins with a linear layer or a convolution at which the network has no other path, and ends before the
    next such place: a residual block is in one stage.

    Args:
        model: on the CPU, in evaluation mode. Only its structure is read.
        names: parameters and buffers of its trees.
        head: name of the last linear layer, which is in no stage.

    Attributes:
        stages: in the order of the network, at least one.

    Raises:
        ModelError: naming the layer or function with which it is not known what a classifier could read.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], head: str) -> None:
        self._model, self._names, self._head = model, tuple(names), head
        self._nodes = list(traced(model).nodes)
        self._values: dict[fx.Node, _Value] = {}
        self._place = {node: number for number, node in enumerate(self._nodes)}
        self._used = {node: max((self._place[user] for user in node.users), default=0) for node in self._nodes}
        self.stages = self._found()
        del self._model, self._values

    def _found(self) -> tuple[Stage, ...]:
        stages, names, weighs, reach, seen = list[Stage](), list[str](), False, 0, set[str]()
        for number, node in enumerate(self._nodes):
            if node.op == "output":
                if node.args[0] is not self._nodes[number - 1] or self._nodes[number - 1].target != self._head:
                    raise ModelError("its outputs are not those of one linear layer")
                break
            module, _ = layer_of(self._model, node)
            value = self._values[node] = self._value(node, module)
            if node.target == self._head:
                continue
            own = under(self._names, [str(node.target)]) if module is not None else ()
            if seen.intersection(own):
                raise ModelError(f"{own[0]!r} is used twice, so that it is not of one depth alone")
            seen.update(own)
            names += own
            weighs = weighs or isinstance(module, (nn.Linear, *CONVOLUTIONS))
            if reach <= number and value.layout in ("maps", "rows"):
                if weighs:
                    stages.append(Stage(tuple(names), value.width, node.name))
                elif stages:
                    stages[-1] = replace(stages[-1], names=(*stages[-1].names, *names), end=node.name)
                names, weighs = (names, False) if not stages else ([], False)
            reach = max(reach, self._used[node])
        if missing := [name for name in self._names if name not in seen and name not in under([name], [self._head])]:
            raise ModelError(f"{missing[0]!r} is of no layer that is known")
        if names or not stages:
            raise ModelError("it has no hidden layer after which all else reads one tensor")
        return tuple(stages)

    def _value(self, node: fx.Node, module: nn.Module | None) -> _Value:
        if node.op == "placeholder":
            return _Value("inputs", 0)
        given = [self._values[one] for one in node.args if isinstance(one, fx.Node)]
        kind: Any = node.target if module is None else type(module)
        if not given or node.op == "get_attr" or kind is F.dropout:
            raise self._unknown(node, module)
        first = given[0]
        if kind in SINGLE or isinstance(module, Preparation) or (kind in POOLS and first.layout != "vectors"):
            return first
        if kind in ADD and len(given) == 2 and given[0].layout == given[1].layout:
            return first
        if flattens(node, module):
            return replace(first, layout="vectors") if first.layout == "maps" else first
        if isinstance(module, nn.Linear) and first.layout != "maps":
            return _Value("rows", module.out_features)
        if isinstance(module, CONVOLUTIONS) and first.layout in ("inputs", "maps"):
            return _Value("maps", module.out_channels)
        if isinstance(module, _BatchNorm | nn.GroupNorm):
            return first
        raise self._unknown(node, module)

    def _unknown(self, node: fx.Node, module: nn.Module | None) -> ModelError:
        return ModelError(f"with {name_of(node, module)} it is not known what a classifier could read")

    def read(self, model: Any, x: Tensor, exits: Sequence[int], whole: bool) -> list[Tensor]:
        """Runs a network up to its last exit, or to its outputs, for classifiers on its way.

        Args:
            model: with tensors in the layers that are run.
            x: a batch of inputs, shape (b, *input shape).
            exits: numbers of stages, ascending.
            whole: whether to go on to the outputs.

        Returns:
            What classifiers after these stages read, shape (b, width) each; and with ``whole`` the outputs.
        """
        ends = [self.stages[number].end for number in exits]
        nodes = self._nodes[: self._stop(ends, whole)]
        found = self._values_of(model, nodes, {nodes[0].name: x}, [*ends, nodes[-1].name] if whole else ends)
        read = [value.flatten(2).mean(-1) if value.dim() > 2 else value for value in found[: len(ends)]]
        return [*read, *found[len(ends) :]]

    def between(self, model: Any, x: Tensor, places: Sequence[int]) -> list[Tensor]:
        """Runs a whole network.

        Args:
            model: with tensors in all layers.
            x: a batch of inputs, shape (b, *input shape).
            places: numbers of stages, ascending.

        Returns:
            What these stages compute, as the layers after them read it; and the outputs.
        """
        nodes = self._nodes[:-1]
        ends = [self.stages[number].end for number in places]
        return self._values_of(model, nodes, {nodes[0].name: x}, [*ends, nodes[-1].name])

    def after(self, model: Any, value: Tensor, place: int) -> Tensor:
        """Returns the outputs of a network whose first stages are left out.

        Args:
            model: with tensors in the layers that are run.
            value: what a stage computed, as in :meth:`between`.
            place: the number of that stage.
        """
        end = self.stages[place].end
        first = next(number for number, node in enumerate(self._nodes) if node.name == end)
        nodes = self._nodes[first:-1]
        return self._values_of(model, nodes, {end: value}, [nodes[-1].name])[0]

    def _values_of(
        self, model: Any, nodes: Sequence[fx.Node], known: dict[str, Tensor], names: Sequence[str]
    ) -> list[Tensor]:
        """Runs consecutive nodes, the first of which is known, and lets go of what no later one reads."""
        values = dict[str, Any](known)
        found = {name: value for name, value in known.items() if name in names}
        for node in nodes[1:]:
            values[node.name] = value = _computed(model, node, values)
            if node.name in names:
                found[node.name] = value
            for one in node.all_input_nodes:
                if self._used[one] == self._place[node]:
                    del values[one.name]
        return [found[name] for name in names]

    def _stop(self, ends: Sequence[str], whole: bool) -> int:
        if whole:
            return len(self._nodes) - 1
        return next(number for number, node in enumerate(self._nodes) if node.name == ends[-1]) + 1


def _computed(model: nn.Module, node: fx.Node, values: Mapping[str, Any]) -> Tensor:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: values[one.name])
    if node.op == "call_module":
        found: Tensor = model.get_submodule(str(node.target))(*args, **kwargs)
    elif node.op == "call_method":
        found = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        function: Any = node.target
        found = function(*args, **kwargs)
    return found
