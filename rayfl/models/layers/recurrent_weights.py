"""Recurrent weights as cuDNN reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def in_one_block(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copies the weights of a recurrent module into one piece of memory, all matrices before all biases.

    That is how cuDNN reads them: weights that lie elsewhere are copied at each call, with a warning.
    """
    order = sorted(range(len(weights)), key=lambda i: weights[i].dim() == 1)
    block = torch.cat([weights[i].reshape(-1) for i in order])
    parts = dict(zip(order, torch.split(block, [weights[i].numel() for i in order]), strict=True))
    return [parts[i].view(weights[i].shape) for i in range(len(weights))]
