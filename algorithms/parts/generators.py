"""Networks that the server trains for itself: their initial values, and the diversity of what they generate."""

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


def diversity(noise: Tensor, features: Tensor) -> Tensor:
    """exp(-mean over pairs of ||eps_i - eps_j||^2 / m |z_i - z_j|_1 / d), in (0, 1]: 1 where all features are equal.

    Args:
        noise: eps, of shape (b, m).
        features: z, of shape (b, d).
    """
    far = (noise[:, None] - noise[None]).square().mean(-1)
    apart = (features[:, None] - features[None]).abs().mean(-1)
    return (-(far * apart).mean()).exp()
