"""SplitMix64, a counter-based generator of random bits, in operations of tensors.

Source: Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
"""

from __future__ import annotations

import torch
from torch import Tensor

GAMMA, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def words(key: Tensor, count: int, offset: int = 0) -> Tensor:
    """Random bits, int64 of shape (*key.shape, count).

    Args:
        key: int64 of any shape.
        count: how many words.
        offset: added to the key.
    """
    counter = torch.arange(count, device=key.device) * signed(GAMMA)
    bits = counter + (key + offset)[..., None]
    bits = (bits ^ (bits >> 30 & (1 << 34) - 1)) * signed(FIRST)
    bits = (bits ^ (bits >> 27 & (1 << 37) - 1)) * signed(SECOND)
    return bits ^ (bits >> 31 & (1 << 33) - 1)


def signed(number: int) -> int:
    """The 64-bit integer with the same bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
