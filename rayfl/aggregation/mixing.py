"""What is done with messages before a robust rule sees them: neighbours are mixed, or buckets of them.

Sources: Allouah et al., AISTATS 2023 (nearest neighbour mixing); Karimireddy, He, Jaggi, ICLR 2022 (bucketing); Nguyen
et al., USENIX Security 2022 (FLAME's choice of a majority).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfl.aggregation.robust import combined, squared_distances
from rayfl.params import TINY, Tree, map_leaves


def nearest_shares(products: Tensor, malicious: int) -> Tensor:
    """Returns with which coefficients a message becomes the mean of its n - f nearest ones, itself among them.

    Of equally near ones the first count. Shape (n, n), a row for each message.

    Args:
        products: inner products of the messages' changes, shape (n, n).
        malicious: f, below n.
    """
    distances = squared_distances(products).fill_diagonal_(-1)  # a message is its own nearest, whatever rounds
    count = len(products) - malicious
    nearest = distances.sort(dim=1, stable=True).indices[:, :count]
    return torch.zeros_like(products).scatter_(1, nearest, 1 / count)


def bucket_shares(count: int, size: int, generator: np.random.Generator) -> Tensor:
    """Returns with which coefficients messages become means of buckets of them, drawn without replacement.

    Shape (m, n) for m = ceil(n / s) buckets, of which the last may have fewer messages.

    Args:
        count: n.
        size: s.
        generator: shuffles the messages.
    """
    order = generator.permutation(count)
    rows = torch.zeros(-(-count // size), count, dtype=torch.float64)
    for row, start in zip(rows, range(0, count, size), strict=True):
        bucket = torch.as_tensor(order[start : start + size])
        row[bucket] = 1 / len(bucket)
    return rows


def mixed(messages: Sequence[Mapping[str, Any]], received: Mapping[str, Tensor], shares: Tensor) -> list[Tree]:
    """Returns a message for each row of coefficients; arguments as for :func:`rayfl.aggregation.robust.combined`."""
    return [combined(messages, received, row) for row in shares]


def majority(products: Tensor) -> list[int]:
    """Returns the messages in the cluster that HDBSCAN finds of more than half of them.

    The distance of two is 1 - cosine; a cluster has n // 2 + 1 messages at least. Since there cannot be two, it is the
    first group of that size that forms where groups with the nearest members are joined one after another.

    Args:
        products: inner products of what is compared, of n at least 3, shape (n, n).
    """
    from sklearn.cluster import HDBSCAN

    norms = products.diagonal().clamp(min=0).sqrt()
    distances = (1 - products / (norms[:, None] * norms).clamp(min=TINY)).clamp(0, 2).fill_diagonal_(0)
    found = HDBSCAN(
        min_cluster_size=len(products) // 2 + 1,
        min_samples=1,
        metric="precomputed",
        allow_single_cluster=True,
        copy=True,
    ).fit(distances.numpy())
    inside: list[int] = np.flatnonzero(found.labels_ >= 0).tolist()
    return inside


def with_noise(tree: Mapping[str, Any], deviation: float, generator: np.random.Generator) -> Tree:
    """Returns a tree with normal noise in each element of its floating-point tensors, in their types.

    Args:
        tree: the tree.
        deviation: sigma; 0 for no noise.
        generator: draws it, leaf by leaf.
    """
    if deviation == 0:
        return {**tree}

    def noisy(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        drawn = torch.from_numpy(generator.standard_normal(tuple(leaf.shape)))
        return (leaf.double() + deviation * drawn).to(leaf.dtype)

    return map_leaves(noisy, tree)
