"""Hypernetworks: networks that make the parameters of a client's model from a vector that describes the client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.parts.generators import linear
from rayfl.engine.client import Client
from rayfl.params import Tree


def initial_hypernetwork(
    model: Mapping[str, Tensor], length: int, hidden: int, trunk_layers: int, generator: np.random.Generator
) -> Tree:
    """Returns h as drawn: a trunk of linear layers, and one linear layer for each tensor of the model.

    Args:
        model: what it makes, by name.
        length: e, of the vectors that it reads.
        hidden: width of the trunk's layers.
        trunk_layers: linear layers of the trunk; 0: h is linear.
        generator: draws the layers.
    """
    like = next(iter(model.values()))
    widths = [length, *[hidden] * trunk_layers]
    trunk = {str(number): linear(inputs, hidden, like, generator) for number, inputs in enumerate(widths[:-1])}
    heads = {name: linear(widths[-1], leaf.numel(), like, generator) for name, leaf in model.items()}
    return {"trunk": trunk, "heads": heads} if trunk else {"heads": heads}


def produced(generator: Mapping[str, Any], embeddings: Tensor) -> dict[str, Tensor]:
    """h(v; phi): the parameters of a model by name, each flat.

    Args:
        generator: phi: ``trunk``, linear layers by number (none for a network that is linear in v), and ``heads``, one
            by name of the parameter that it makes.
        embeddings: v, of shape (..., e).
    """
    hidden = embeddings
    for number, layer in generator.get("trunk", {}).items():
        hidden = F.linear(hidden.relu() if int(number) else hidden, layer["weight"], layer["bias"])
    return {name: F.linear(hidden, head["weight"], head["bias"]) for name, head in generator["heads"].items()}


def produced_model(generator: Tree, embedding: Tensor, where: Client) -> Tree:
    """theta = h(v; phi) of one client, whose bits depend on no other client."""
    initial = where.initial_model()
    with torch.no_grad():
        return {name: flat.view_as(initial[name]) for name, flat in produced(generator, embedding).items()}


def products(made: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """<Delta, h(v)> by tensor of the model, summed over clients.

    Args:
        made: h(v), each of shape (clients, n).
        changes: Delta, of the same shapes.
    """
    return ((changes[name] * flat).sum() for name, flat in made.items())
