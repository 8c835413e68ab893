"""What adapters and heads are before any training: functions of the seed and of a tensor's name."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor, nn

from rayfl.models.pretrained.feature_adapter import OF_FEATURES
from rayfl.models.pretrained.rescaling import FACTORS, Rescaled
from rayfl.models.pretrained.sites import Matrix, Site, TrainedLinear
from rayfl.models.pretrained.text_head import TextHead

_HEAD_SCALE = 0.02
"""Standard deviation of new heads, that of transformers, and of contexts, that of CoOp."""


def own_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what does not belong to the base: adapters and head, trained or not."""
    return {
        f"{name}.{key}": tuple(parameter.shape)
        for name, module in model.named_modules()
        if isinstance(module, Matrix | Rescaled | Site | TextHead | TrainedLinear)
        for key, parameter in module.named_parameters(recurse=False)
    }


def initial_value(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """A is uniform within 1/sqrt(i), B and biases are zero, vectors that rescale are ones, others normal.

    So are matrices on features: uniform, as PyTorch draws linear layers of i inputs.

    Args:
        seed: of the experiment's initial model.
        name: of the tensor in a tree.
        shape: of the tensor.

    Returns:
        float32, on the CPU.
    """
    if name.endswith((".lora_B.weight", ".bias")):
        return torch.zeros(shape)
    if name.endswith(FACTORS):
        return torch.ones(shape)
    key = np.frombuffer(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    if name.endswith(".lora_A.weight") or name.startswith(OF_FEATURES):
        bound = shape[1] ** -0.5
        return torch.from_numpy(generator.uniform(-bound, bound, shape)).float()
    return torch.from_numpy(generator.normal(0, _HEAD_SCALE, shape)).float()
