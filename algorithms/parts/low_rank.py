"""Matrices in few numbers: truncated singular value decompositions that keep a share of the energy."""

from __future__ import annotations

import torch
from torch import Tensor

from rayfl.params import Tree


def rank(values: Tensor, energy: float) -> int:
    """The smallest r whose r largest singular values have the given share of sum s_i^2.

    Args:
        values: singular values, descending.
        energy: the share, in [0, 1].

    Returns:
        0 where all are zero.
    """
    kept = values.double().square().cumsum(0)
    if not len(kept) or kept[-1] == 0:
        return 0
    return min(int((kept < energy * kept[-1]).sum()) + 1, len(values))


def compressed(tree: Tree, energy: float) -> Tree:
    """A flat tree in which matrices are factors where these are fewer numbers.

    A tensor of two and more dimensions is the matrix (first dimension, all others), of which ``left`` (m, r),
    ``values`` (r,) and ``right`` (r, n) remain. What has fewer dimensions, or would not shrink, stays as it is.

    Args:
        tree: tensors by name.
        energy: the share of each matrix's squared singular values that is kept at least.
    """
    return {name: _factors(leaf, energy) for name, leaf in tree.items()}


def restored(tree: Tree, like: Tree) -> Tree:
    """The inverse of :func:`compressed`, but for what was cut off.

    Args:
        tree: tensors and factors by name.
        like: tensors of the original's shapes, by name.
    """
    return {name: _product(tree[name], leaf) for name, leaf in like.items()}


def _factors(leaf: Tensor, energy: float) -> Tensor | Tree:
    if leaf.dim() < 2:
        return leaf
    matrix = leaf.flatten(1)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    r = rank(values, energy)
    if r * (sum(matrix.shape) + 1) >= matrix.numel():
        return leaf
    return {"left": left[:, :r].clone(), "values": values[:r].clone(), "right": right[:r].clone()}


def _product(found: Tensor | Tree, like: Tensor) -> Tensor:
    if isinstance(found, Tensor):
        return found
    matrix: Tensor = found["left"] * found["values"] @ found["right"]
    return matrix.reshape(like.shape)
