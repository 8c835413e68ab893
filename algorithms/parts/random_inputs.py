"""Inputs that are no data: what models make of them tells models apart."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rayfl.examples import InputSpec


def random_inputs(spec: InputSpec, count: int, generator: np.random.Generator) -> Tensor:
    """Inputs as a network takes them: standard normal numbers, or tokens that are all alike probable.

    Args:
        spec: of the data.
        count: how many inputs.
        generator: where they come from.
    """
    shape = (count, *spec.of_model.shape)
    if spec.kind == "tokens":
        return torch.from_numpy(generator.integers(spec.vocabulary, size=shape))
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32))
