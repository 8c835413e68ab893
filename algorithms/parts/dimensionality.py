"""How many dimensions points have near each of them (local intrinsic dimensionality)."""

from __future__ import annotations

import torch
from torch import Tensor

_NEAR = 1e-6
"""Added to the largest distance, which may be 0."""
_LARGEST = 1000.0
"""An estimate above it comes from neighbours that are all equally far, but for round-off."""
_ROWS = 1024
"""Points whose distances from all others are in memory at a time."""


def local_dimensionality(points: Tensor, neighbours: int) -> Tensor:
    """The maximum likelihood estimate of the local intrinsic dimensionality at each point, float64 of shape (n,).

    With r_1 <= .. <= r_k the distances from a point to its k nearest neighbours it is

        -k / sum_{i=1..k} log(r_i / (r_k + 1e-6))

    and 0 where a neighbour is at the same place, or where all neighbours are equally far (within about a thousandth),
    which says nothing of dimensions. Of fewer than three points all are 0.

    Args:
        points: shape (n, d).
        neighbours: k; n - 1, where that is less.

    References:
        Amsaleg, Chelly, Furon, Girard, Houle, Kawarabayashi, Nett: Estimating Local Intrinsic Dimensionality, KDD 2015.
    """
    count = min(neighbours, len(points) - 1)
    found = points.new_zeros(len(points), dtype=torch.float64)
    if count < 2:
        return found
    everything = points.double()
    for start in range(0, len(points), _ROWS):
        # products of matrices would lose what is small beside the points themselves
        apart = torch.cdist(everything[start : start + _ROWS], everything, compute_mode="donot_use_mm_for_euclid_dist")
        nearest = apart.topk(count + 1, largest=False).values[:, 1:]  # the nearest of all is the point itself
        found[start : start + _ROWS] = -count / (nearest / (nearest[:, -1:] + _NEAR)).log().sum(1)
    return torch.where(found > _LARGEST, 0.0, found)
