"""Layers that a method puts next to a network: their tensors, as PyTorch initialises them, and what they compute.

Tensors have names that no network's have, since some of a network's are treated by their name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.params import Tree


def draw_linear(inputs: int, outputs: int, like: Tensor, generator: np.random.Generator) -> Tree:
    """``matrix`` (outputs, inputs) and ``offset`` (outputs,) of a linear layer, uniform within 1/sqrt(inputs).

    Args:
        inputs: width of what the layer reads.
        outputs: width of what it gives.
        like: a tensor of the type and device wanted.
        generator: where the numbers come from.
    """
    bound = 1 / math.sqrt(inputs)
    shapes = {"matrix": (outputs, inputs), "offset": (outputs,)}
    return {name: torch.from_numpy(generator.uniform(-bound, bound, shape)).to(like) for name, shape in shapes.items()}


def unit_norm(width: int, like: Tensor) -> Tree:
    """``norm_gain`` 1 and ``norm_offset`` 0 of a layer normalization, shape (width,) each."""
    return {"norm_gain": like.new_ones(width), "norm_offset": like.new_zeros(width)}


def linear(layer: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """``matrix`` x + ``offset`` for x of shape (..., inputs)."""
    return F.linear(x, layer["matrix"], layer["offset"])


def normalized(layer: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The layer normalization of x over its last dimension."""
    return F.layer_norm(x, x.shape[-1:], layer["norm_gain"], layer["norm_offset"])
