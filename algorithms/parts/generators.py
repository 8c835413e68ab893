"""What networks that the server trains for itself begin with."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from rayfl.params import Tree


def linear(inputs: int, outputs: int, like: Tensor, generator: np.random.Generator) -> Tree:
    """``weight`` (outputs, inputs) and ``bias`` of a linear layer, with the distribution of PyTorch's initial values.

    Args:
        inputs: how many values it reads.
        outputs: how many it makes.
        like: has the type and device wanted.
        generator: draws them.
    """
    bound = 1 / math.sqrt(inputs)
    drawn = generator.uniform(-bound, bound, (outputs, inputs)), generator.uniform(-bound, bound, outputs)
    return {name: torch.from_numpy(values).to(like) for name, values in zip(("weight", "bias"), drawn, strict=True)}
