"""Means over clients of which each sends some elements of the model: every element over those that send it."""

from __future__ import annotations

import torch

from algorithms.parts.masks import inverted, masked
from algorithms.parts.partial import separated
from rayfl.models.base import Network
from rayfl.params import Tree
from rayfl.tasks.base import Model


def mean_of_sharing(mean: Tree, sharing: Tree, old: Model) -> Tree:
    """Returns the mean of each element over the clients that share it; the old value where nobody does.

    Args:
        mean: over all clients, with 0 in the place of what they do not share.
        sharing: of some of the tensors, the weight of those that share an element over the weight of all; where that
            is 1 the mean is taken to the bit.
        old: the parameters before.
    """
    found = dict(mean)
    for name, weight in sharing.items():
        found[name] = torch.where(weight > 0, mean[name] / torch.where(weight > 0, weight, 1), old[name])
    return found


def message(model: Model, own: Tree, network: Network) -> Tree:
    """The parts of a model, 0 in the place of a client's own elements; in ``sharing`` these are 0 and others 1."""
    parts = separated(model, network)
    others = inverted(own)
    parts["parameters"] = masked(parts["parameters"], others)
    return {
        **parts,
        **({"sharing": {name: mask.to(model[name].dtype) for name, mask in others.items()}} if own else {}),
    }
