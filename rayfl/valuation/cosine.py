"""How far clients' updates point where the server's own step points."""

from __future__ import annotations

import torch
from torch import Tensor


def cosines(products: Tensor, weights: Tensor) -> Tensor:
    """Returns the cosine of each update with their weighted mean, float64 of shape (n,); 0 where one of both is zero.

    Args:
        products: inner products of the updates, float64 of shape (n, n).
        weights: of the mean, float64 of shape (n,), positive.
    """
    shares = weights / weights.sum()
    along = products @ shares
    lengths = products.diagonal().clamp(min=0).sqrt() * (shares @ along).clamp(min=0).sqrt()
    return torch.where(lengths > 0, along / lengths, 0.0).clamp(-1, 1)
