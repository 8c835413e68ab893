"""Which rows of a table each step reads, as numbers that every type of tensors has."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BYTES = 4
"""Of a place in a table: draws have the type of the model's tensors, and all of these types have the numbers below 256.
"""


def passes(generator: np.random.Generator, rows: int, steps: int, size: int) -> np.ndarray:
    """Places of the rows of each step, pass after pass over a table in an order of its own; shape (steps, size).

    Args:
        generator: draws the orders.
        rows: of the table.
        steps: how many there are.
        size: rows of each.
    """
    orders = [generator.permutation(rows) for _ in range(-(-steps * size // rows))]
    return np.concatenate([np.empty(0, np.int64), *orders])[: steps * size].reshape(steps, size)


def in_digits(places: np.ndarray) -> np.ndarray:
    """What a draw has in the place of places, int64 of any shape: one more dimension, of digits."""
    return places[..., None] >> 8 * np.arange(_BYTES) & 255


def from_digits(digits: Tensor) -> Tensor:
    """The places that such digits are of, int64."""
    return (digits.long() << 8 * torch.arange(_BYTES, device=digits.device)).sum(-1)
