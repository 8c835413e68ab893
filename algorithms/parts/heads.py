"""Classifier heads apart from their network: last linear layers as functions of their tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from rayfl.models.base import Network


def head_logits(network: Network, head: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Logits of shape (b, C) of a head for inputs of shape (b, f).

    Args:
        network: names the head's tensors; lends the bias where that is a parameter that nobody trains.
        head: the tensors under these names; others are ignored.
        inputs: what the head reads.
    """
    bias = f"{network.head_weight.removesuffix('weight')}bias"
    fixed = network.fixed_parameters.get(bias) if bias not in head else None
    return F.linear(inputs, head[network.head_weight], head.get(bias) if fixed is None else fixed.to(inputs))
