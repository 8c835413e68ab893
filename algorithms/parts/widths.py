"""Parts of a network's hidden units: which a client has, the network cut down to them, and means over those who do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfl.errors import ConfigError, ModelError
from rayfl.models.units import Axis, Units
from rayfl.objectives.numbers import Factor
from rayfl.objectives.points import TRAINED, Point, Scope, Share
from rayfl.params import Tree
from rayfl.tasks.base import Model, Task

Held = tuple[Tensor, ...]
"""By hidden layer the units that a client has, int64, all different."""

_ROUNDING = 1e-9
"""So that 0.1 of 30 units are 3 units."""


def check_units(method: str, task: Task) -> None:
    """Refuses a network whose hidden units are not known.

    Args:
        method: its name.
        task: has the network.

    Raises:
        ConfigError: naming what is in the way, and the fix.
    """
    network: Any = task.network
    fix = "choose a model of linear layers and convolutions (model=two_nn, two_cnn, vgg9, resnet9, ...)"
    if "adapters" in network.groups:
        raise ConfigError(f"{method} needs a model that is cut by width, not a transformer with adapters: {fix}")
    try:
        units = network.units
    except ModelError as error:
        raise ConfigError(f"{method} needs a model that can be cut by width: {fix}. This one: {error}") from None
    if not units.sizes:
        raise ConfigError(f"{method} needs a model that can be cut by width, and this one has no hidden layer: {fix}")


def count_of(size: int, width: float) -> int:
    """Returns how many of a layer's units a width is, ceil(r d), at least 1."""
    return max(math.ceil(width * size - _ROUNDING), 1)


def window(units: Units, width: float, start: int = 0) -> Held:
    """The units start, start + 1, ... of each layer, as many as a width is; the first come after the last."""
    return tuple((start + torch.arange(count_of(size, width))) % size for size in units.sizes)


def cut(model: Model, held: Held, units: Units) -> Tree:
    """The network with these units alone; tensors that lose nothing are the model's own."""
    found = {}
    for name, leaf in model.items():
        for dimension, entries in _entries(name, held, units):
            leaf = leaf.index_select(dimension, entries.to(leaf.device))
        found[name] = leaf
    return found


def padded(part: Model, held: Held, units: Units) -> Tree:
    """The inverse of :func:`cut`, with zeros for the other units.

    Such a unit has inputs and outputs of weight 0: its output is 0, it adds nothing to what reads it, and none of its
    parameters has a gradient. So a network padded with zeros trains as the one that was cut out.
    """
    found = {}
    for name, leaf in part.items():
        for dimension, entries in _entries(name, held, units):
            shape = list(leaf.shape)
            shape[dimension] = _length(units.axes[name][dimension], units)
            leaf = leaf.new_zeros(shape).index_copy_(dimension, entries.to(leaf.device), leaf)
        found[name] = leaf
    return found


def narrowed(model: Model, counts: Tensor, units: Units) -> Tree:
    """The model with zeros for all units but the first ones of each layer; has gradients, and can be stacked.

    Args:
        model: of the network's shapes.
        counts: how many units of each layer stay, shape (layers,).
        units: of the network.
    """
    found = {}
    for name, leaf in model.items():
        for dimension, axis in enumerate(units.axes[name]):
            if axis is not None:
                places = torch.arange(leaf.shape[dimension], device=leaf.device) // axis.block
                stay = (places < counts[axis.layer]).to(leaf.dtype)
                leaf = leaf * stay.reshape(-1, *[1] * (leaf.dim() - dimension - 1))
        found[name] = leaf
    return found


def bytes_of(model: Model, held: Held, units: Units) -> int:
    """Bytes of the network with these units alone."""
    found = 0
    for name, leaf in model.items():
        shape = list(leaf.shape)
        for dimension, entries in _entries(name, held, units):
            shape[dimension] = len(entries)
        found += math.prod(shape) * leaf.element_size()
    return found


def weights_by_element(held: Sequence[Held], weights: Sequence[float], units: Units, like: Model) -> Tree:
    """The sum of the weights of the clients that have an element; float64, by name, of shapes that broadcast.

    Args:
        held: of each client.
        weights: q_k, of any sum.
        units: of the network.
        like: tensors of the network's shapes.
    """
    q = torch.tensor(weights, dtype=torch.float64)
    present = [torch.zeros(len(held), size, dtype=torch.float64) for size in units.sizes]
    for layer, rows in enumerate(present):
        for row, own in zip(rows, held, strict=True):
            row[own[layer]] = 1.0
    found = {}
    for name, leaf in like.items():
        first, second = units.axes[name]
        left = q[:, None] if first is None else present[first.layer] * q[:, None]
        right = torch.ones(len(held), 1, dtype=torch.float64) if second is None else present[second.layer]
        sums = left.T @ right
        for dimension, axis in enumerate((first, second)):
            if axis is not None:
                sums = sums.repeat_interleave(axis.block, dimension)
        found[name] = sums.reshape((*sums.shape, *[1] * leaf.dim())[: leaf.dim()])
    return found


def merged(old: Model, mean: Model, having: Mapping[str, Tensor], total: float) -> Tree:
    """The mean of each element over the clients that have it; the old value where nobody has.

    Args:
        old: the model before.
        mean: over all clients, with 0 in the place of what they do not have.
        having: by name, sums of the weights of those that have an element.
        total: the sum of all weights. Where all have an element the mean is taken to the bit.
    """
    found = {}
    for name, leaf in old.items():
        weight = having[name]
        taken = mean[name].double() * (total / torch.where(weight > 0, weight, total))
        found[name] = torch.where(weight > 0, taken.to(leaf.dtype), leaf)
    return found


def scaled(model: Model, factor: float, units: Units) -> Tree:
    """A model in which the outputs of hidden linear layers and convolutions are multiplied by a factor."""
    if factor == 1:
        return dict(model)
    return {name: leaf * factor if name in units.outputs else leaf for name, leaf in model.items()}


@dataclass(frozen=True)
class Scaled(Point):
    """The trained model with the outputs of hidden linear layers and convolutions multiplied by a factor."""

    factor: Factor

    def shares(self, scope: Scope) -> Mapping[str, Sequence[Share]]:
        """See :class:`rayfl.objectives.points.Point`."""
        network: Any = scope.task.network
        outputs = network.units.outputs
        return {n: [Share(TRAINED, n, self.factor if n in outputs else 1)] for n in network.parameter_names}

    def base(self, scope: Scope) -> Tree:
        """See :class:`rayfl.objectives.points.Point`."""
        return dict(scope.trained)


def _entries(name: str, held: Held, units: Units) -> list[tuple[int, Tensor]]:
    """By dimension of a parameter the entries of the held units; of dimensions that lose some."""
    found = []
    for dimension, axis in enumerate(units.axes[name]):
        if axis is not None and len(held[axis.layer]) < units.sizes[axis.layer]:
            entries = held[axis.layer][:, None] * axis.block + torch.arange(axis.block)
            found.append((dimension, entries.flatten()))
    return found


def _length(axis: Axis | None, units: Units) -> int:
    assert axis is not None
    return units.sizes[axis.layer] * axis.block
