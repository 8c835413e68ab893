"""Inputs that are no data: what models make of them tells models apart."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rayfl.examples import InputSpec

_EDGES = 0.1


def random_inputs(spec: InputSpec, count: int, generator: np.random.Generator) -> Tensor:
    """Inputs as a network takes them: standard normal numbers, tokens that are all alike probable, or random graphs.

    Graphs have all nodes that there is room for, each pair of them with an edge with probability 0.1, and normal
    numbers. There are as many graphs as have ``count`` nodes together.

    Args:
        spec: of the data.
        count: how many inputs; of graphs, how many nodes.
        generator: where they come from.
    """
    if spec.kind == "graph":
        count = -(-count // spec.shape[0])
    shape = (count, *spec.of_model.shape)
    if spec.kind == "tokens":
        return torch.from_numpy(generator.integers(spec.vocabulary, size=shape))
    x = torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
    if spec.kind == "graph":
        nodes = shape[1]
        upper = np.triu(generator.random((count, nodes, nodes), dtype=np.float32) < _EDGES, 1)
        x[..., :nodes] = torch.from_numpy(upper | upper.transpose(0, 2, 1))
        x[..., nodes] = 1  # it exists
    return x
