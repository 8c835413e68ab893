"""The prior of the balanced softmax: what a client's class counts add to its logits."""

from __future__ import annotations

import torch
from torch import Tensor

ABSENT = -1e4
"""In place of log 0: a softmax has the same bits, and what is masked stays finite."""


def log_prior(counts: Tensor, exponent: float, absent_count: float = 0.0) -> Tensor:
    """Returns log n_c^gamma by class, shape (C,), float64; with gamma = 0 that is 0 for every class.

    Args:
        counts: n_c, the client's samples of each class, shape (C,), float64.
        exponent: gamma, at least 0.
        absent_count: n_c of a class without samples; 0 leaves it out of the softmax.
    """
    assumed = torch.where(counts > 0, counts, absent_count)
    present = (assumed > 0) | (exponent == 0)
    return torch.where(present, exponent * torch.where(assumed > 0, assumed, 1).log(), ABSENT)
