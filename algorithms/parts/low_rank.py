"""Matrices in few numbers: singular value decompositions, truncated to a share of the energy or of narrow products."""

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


def decomposed_product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition of a product of two narrow matrices, which is not made.

    With left = Q_1 R_1 and right^T = Q_2 R_2 it is that of R_1 R_2^T, turned by Q_1 and Q_2. Each column of U has its
    largest entry positive.

    Args:
        left: shape (o, m).
        right: shape (m, i).

    Returns:
        U of shape (o, n), the n singular values that are not 0 to rounding, descending, and V^T of shape (n, i).
    """
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.mT)
    u, values, v = torch.linalg.svd(r_left @ r_right.mT, full_matrices=False)
    largest = torch.finfo(values.dtype).eps * max(r_left.shape[-1], 1) * (r_left.norm() * r_right.norm())
    kept = int((values > largest).sum())
    u, values, v = q_left @ u[:, :kept], values[:kept], v[:kept] @ q_right.mT
    places = u.abs().argmax(0, keepdim=True)
    signs = torch.where(u.gather(0, places) < 0, -1.0, 1.0).to(u)
    return u * signs, values, v * signs.mT


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
