"""How far messages are from what earlier rounds let expect of their clients: a matrix autoregressive model.

Sources: Gabrielli et al., arXiv 2303.16668 (FLANDERS); Chen, Xiao, Yang, Journal of Econometrics 2021 (the model, and
alternating least squares).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayfl.params import leaves


def floating_size(message: Mapping[str, Any]) -> int:
    """Returns how many floating-point numbers a message has."""
    return sum(leaf.numel() for _, leaf in leaves(message) if leaf.is_floating_point())


def in_places(message: Mapping[str, Any], places: Tensor, received: Mapping[str, Tensor] | None) -> Tensor:
    """Returns a message in some of its floating-point numbers, float64 of shape (n,).

    Args:
        message: a tree.
        places: numbers of elements over all leaves in their order, ascending, shape (n,).
        received: by path, what is subtracted; None: nothing.
    """
    parts, first = list[Tensor](), 0
    for path, leaf in leaves(message):
        if not leaf.is_floating_point():
            continue
        begin, end = torch.searchsorted(places, torch.tensor([first, first + leaf.numel()])).tolist()
        own = places[begin:end] - first
        taken = leaf.flatten()[own].double()
        parts.append(taken if received is None else taken - received[path].flatten()[own].double())
        first += leaf.numel()
    return torch.cat(parts)


def forecast(past: Sequence[Tensor], ridge: float, iterations: int) -> Tensor:
    """Returns what a matrix autoregressive model of order 1 expects next, float64 of shape (m, n).

    The model is X_t = A X_{t-1} B^T + E_t. A and B are found by alternating least squares, beginning at B = 1: each
    minimises the sum of squared errors, divided by the mean square s^2 of all entries, plus ridge times its squared
    norm. The forecast is A X_T B^T. B, of shape (n, n), is never made: with the rows of all A X_{t-1} below each other
    in Z and those of all X_t in Y, it is Y^T (Z Z^T + s^2 ridge)^{-1} Z, so that an iteration takes time in proportion
    to n. Of one matrix there is no pair to learn from: the forecast is that matrix.

    Args:
        past: X_1, ..., X_T, float64 of shape (m, n) each.
        ridge: more than 0.
        iterations: how often A and B are found in turn.
    """
    last = past[-1]
    square = float(torch.stack(list(past)).square().mean())
    if len(past) == 1 or square == 0:
        return last
    before, after, weight = torch.stack(list(past[:-1])), torch.stack(list(past[1:])), ridge * square
    own = torch.eye(len(last), dtype=torch.float64)
    stacked = after.flatten(0, 1)
    many = torch.eye(len(stacked), dtype=torch.float64)
    turned, ahead = before, last  # X_{t-1} B^T of all pairs, and X_T B^T
    for _ in range(iterations):
        squares = (turned @ turned.mT).sum(0) + weight * own
        left = torch.linalg.solve(squares, (turned @ after.mT).sum(0)).mT
        below = (left @ before).flatten(0, 1)
        solved = torch.linalg.solve(below @ below.mT + weight * many, stacked)
        turned, ahead = (before @ below.mT) @ solved, (last @ below.mT) @ solved
    found: Tensor = left @ ahead
    return found
