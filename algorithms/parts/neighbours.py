"""Mixtures of each client's few nearest models, for all clients of a cohort at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayfl.params import Tree, from_leaves, leaves

_BLOCK = 1 << 22
"""Numbers of float64 of all clients together that are looked at together: models of any size take 32 MB at a time."""


def squared_distances(points: Sequence[Sequence[Tensor]], models: Sequence[Sequence[Tensor]]) -> Tensor:
    """||a_i - b_j||^2 over all tensors, float64 of shape (m, m); not finite where a_i or b_j is not.

    Args:
        points: the tensors of a_1..a_m.
        models: those of b_1..b_m, of the same shapes.
    """
    count = len(models)
    one, other, own = (torch.zeros(count, dtype=torch.float64) for _ in range(3))
    products = torch.zeros(count, count, dtype=torch.float64)
    for left, right in zip(zip(*points, strict=True), zip(*models, strict=True), strict=True):
        for (_, a), (_, b) in zip(_blocks(left), _blocks(right), strict=True):
            # Around their centre the models are short, and little cancels between their lengths and products.
            finite = b.isfinite().all(1)
            centre = b[finite].mean(0) if finite.any() else torch.zeros_like(b[0])
            a, b = a - centre, b - centre
            one += a.square().sum(1).cpu()
            other += b.square().sum(1).cpu()
            own += (a - b).square().sum(1).cpu()
            products += (a @ b.T).cpu()
    found = (one[:, None] + other - 2 * products).clamp(min=0)
    # A point is often much nearer to its own model than to all others.
    return found.diagonal_scatter(own)


def inverse_weights(distances: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The nearest of each row, and weights of them in proportion to 1 / d, of sum 1.

    Where some distances are 0, their weights are equal, and the others 0. What is not finite counts as infinitely far.
    A row of nothing else has its own column, with weight 1.

    Args:
        distances: d, float64 of shape (m, m).
        count: how many of a row have a weight, at most m.

    Returns:
        Weights, float64 of shape (m, count), descending, and the columns that they belong to.
    """
    far = torch.where(distances.isfinite(), distances, torch.inf)
    lost = far.isinf().all(1).nonzero()[:, 0]
    far[lost, lost] = 0
    found, columns = (part[:, :count] for part in torch.sort(far, stable=True))
    nearest = found[:, :1]
    shares = torch.where(found == nearest, 1, nearest / found)
    return shares / shares.sum(1, keepdim=True), columns


def mixtures(trees: Sequence[Mapping[str, Any]], weights: Tensor, columns: Tensor) -> list[Tree]:
    """``sum_k weights[i, k] * trees[columns[i, k]]`` for each i, accumulated in float64, in the leaves' own types.

    Args:
        trees: m trees of one structure.
        weights: float64 of shape (I, k). Trees with weight 0 are not read, unless they stand first in a row.
        columns: int64 of shape (I, k).

    Returns:
        I trees.
    """
    # 0 times a model that has diverged would not be 0
    columns = torch.where(weights > 0, columns, columns[:, :1])
    of_trees = [dict(leaves(tree)) for tree in trees]
    sums: list[dict[str, Tensor]] = [{} for _ in weights]
    for path, like in of_trees[0].items():
        for one in sums:
            one[path] = torch.empty_like(like)
        for start, rows in _blocks([tree[path] for tree in of_trees]):
            shares, chosen = weights.to(rows.device), columns.to(rows.device)
            total = shares[:, :1] * rows[chosen[:, 0]]
            for place in range(1, shares.shape[1]):
                total.addcmul_(shares[:, place, None], rows[chosen[:, place]])
            for one, part in zip(sums, total, strict=True):
                one[path].view(-1)[start : start + len(part)] = part.to(like.dtype)
    return [from_leaves(one) for one in sums]


def _blocks(tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yields consecutive entries of m tensors of one shape: the place of the first, and float64 of shape (m, c)."""
    width = max(_BLOCK // len(tensors), 1)
    flat = [tensor.reshape(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), width):
        yield start, torch.stack([one[start : start + width] for one in flat]).double()
