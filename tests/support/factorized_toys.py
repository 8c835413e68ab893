"""A tiny network whose weights have factors, and what weights are made of, written by loops over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.examples import InputSpec
from rayfl.models.networks.perceptron import TwoNN
from rayfl.tasks.classification import Classification
from tests.support.toy_networks import DoubleNetwork

SPEC = InputSpec("image", (5,), 9)
"""With fewer classes the last layer would be too small for factors."""


def factorized_layers(composition: str = "pfedpara", double: bool = True, **options: Any) -> Classification:
    """Layers of 5-24-24-9 units, of which all but the first are large enough for factors."""
    section = TwoNN(hidden=(24, 24), factorize={"name": composition, **options})  # type: ignore[arg-type]
    network = section.network(SPEC)
    if double:
        groups, network = network.groups, DoubleNetwork(partial(section.whole, SPEC))
        network.groups = groups
    return Classification(network)


def weight_of(tree: Mapping[str, Tensor], layer: str, composition: str) -> Tensor:
    """The weight of a linear layer, shape (m, n)."""

    def product(which: int) -> Tensor:
        x, y = tree[f"{layer}.weight_x{which}"], tree[f"{layer}.weight_y{which}"]
        return sum(torch.outer(x[:, r], y[:, r]) for r in range(x.shape[1]))  # type: ignore[return-value]

    if composition == "low_rank":
        return product(1)
    return product(1) * product(2) + (product(1) if composition == "pfedpara" else 0)


def logits_of(tree: Mapping[str, Tensor], x: Tensor, composition: str) -> Tensor:
    """Outputs of :func:`factorized_layers`, shape (b, 9)."""
    for layer in ("hidden.0", "hidden.1", "head"):
        has_factors = f"{layer}.weight_x1" in tree
        weight = weight_of(tree, layer, composition) if has_factors else tree[f"{layer}.weight"]
        x = F.linear(x, weight, tree[f"{layer}.bias"])
        x = x if layer == "head" else torch.relu(x)
    return x
