"""Subspaces that clients' samples span: their leading directions, and angles between those of two clients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.parts.simplex import Array
from rayfl.params import Tree

Proximity = Literal["vectors", "subspaces", "sum"]
"""Which angle stands between two signatures; see :func:`angles`."""

RIGHT = 90.0
"""The angle, in degrees, to a vector that is not there."""

_DECIMALS = 5
"""Degrees are rounded to this many decimals: the last bits of a decomposition decide nothing, and equal ones give 0."""


def leading_vectors(rows: Array, count: int | None = None) -> Array:
    """Returns the first left singular vectors of the matrix whose columns are the samples, shape (d, m).

    The entry of largest magnitude of each vector is positive. Vectors without a singular value, which would be
    arbitrary, are left out: m is at most ``count`` and the rank.

    Args:
        rows: samples, float64 of shape (n, d).
        count: how many vectors; None for all.
    """
    if not rows.size:
        return np.zeros((rows.shape[1], 0))
    vectors, values, _ = np.linalg.svd(rows.T, full_matrices=False)
    rank = int((values > values[0] * max(rows.shape) * np.finfo(np.float64).eps).sum())
    kept = vectors[:, : rank if count is None else min(count, rank)]
    largest = np.abs(kept).argmax(0)
    found: Array = kept * np.where(kept[largest, np.arange(kept.shape[1])] < 0, -1.0, 1.0)
    return found


def signature(x: Tensor, classes: Tensor | None, count: int) -> Tree:
    """Returns what a client tells of its samples.

    Args:
        x: samples, shape (n, ...). They are decomposed in float64 on the CPU.
        classes: of the samples, int64 of shape (n,); None to take all samples together.
        count: p, how many vectors of each class.

    Returns:
        ``vectors``, float64 of shape (d, m), and their ``classes``, int64 of shape (m,), ascending; within a class
        vectors are in the order of their singular values.
    """
    rows = x.detach().cpu().double().flatten(1).numpy()
    labels = np.zeros(len(rows), np.int64) if classes is None else classes.cpu().numpy()
    present = np.unique(labels)
    blocks = [leading_vectors(rows[labels == label], count) for label in present]
    counts = [block.shape[1] for block in blocks]
    vectors = np.concatenate([np.zeros((rows.shape[1], 0)), *blocks], 1)
    return {"vectors": torch.from_numpy(vectors), "classes": torch.from_numpy(np.repeat(present, counts))}


def angles(signatures: Sequence[Tree], others: Sequence[Tree], measure: Proximity) -> Array:
    """Returns the angle of each signature to each of some others, in degrees; shape (len(signatures), len(others)).

    The signs of vectors do not matter.

    Args:
        signatures: clients' vectors and their classes.
        others: other clients'.
        measure: ``vectors``: the least angle between a vector of the one and a vector of the other. ``subspaces``: the
            smallest principal angle between the spans. ``sum``: the sum of the angles between vectors of the same class
            and rank, with a right angle for each that only one has. For the first two a client without vectors is at a
            right angle to everybody.
    """
    if measure == "sum":
        return _sums(signatures, others)
    left, right = ([_rows(one, measure) for one in group] for group in (signatures, others))
    filled = [place for place, rows in enumerate(right) if len(rows)]
    found = np.full((len(left), len(right)), RIGHT)
    if filled:
        stacked, starts = np.concatenate([right[place] for place in filled]), _starts([right[j] for j in filled])
        for place, rows in enumerate(left):
            if len(rows):
                found[place, filled] = _least_angles(rows, stacked, starts, measure)
    return found


def proximity_matrix(signatures: Sequence[Tree], measure: Proximity) -> Array:
    """Returns the angles between signatures in degrees, symmetric with zeros on the diagonal; shape (K, K)."""
    # Last bits may depend on the order of two clients: of each pair one angle counts.
    upper = np.triu(angles(signatures, signatures, measure), 1)
    found: Array = upper + upper.T
    return found


def _least_angles(rows: Array, stacked: Array, starts: Sequence[int], measure: Proximity) -> Array:
    """Returns the angles of a client to others, shape (n,).

    Args:
        rows: the client's vectors, shape (m, d).
        stacked: those of the others, one after the other.
        starts: where each begins, n numbers.
        measure: ``vectors`` or ``subspaces``.
    """
    products = rows @ stacked.T
    if measure == "vectors":
        return _degrees(np.maximum.reduceat(np.abs(products).max(0), starts))
    blocks = np.split(products, starts[1:], 1)
    return _degrees(np.array([np.linalg.svd(block, compute_uv=False)[0] for block in blocks]))


def _sums(signatures: Sequence[Tree], others: Sequence[Tree]) -> Array:
    """Returns the angles of the measure ``sum``, by class and rank for all clients together."""
    left, right = ([_by_rank(one) for one in group] for group in (signatures, others))
    total, pairs = np.zeros((len(left), len(right))), np.zeros((len(left), len(right)))
    for key in sorted({key for one in left for key in one} & {key for one in right for key in one}):
        here, there = ([place for place, one in enumerate(group) if key in one] for group in (left, right))
        cosines = np.stack([left[place][key] for place in here]) @ np.stack([right[place][key] for place in there]).T
        total[np.ix_(here, there)] += _degrees(cosines)
        pairs[np.ix_(here, there)] += 1
    counts, others_counts = (np.array([len(one) for one in group], dtype=np.float64) for group in (left, right))
    alone = counts[:, None] + others_counts[None] - 2 * pairs
    found: Array = np.round(total + RIGHT * alone, _DECIMALS)
    return found


def _degrees(cosines: Array) -> Array:
    """Returns the angles between 0 and 90 with these cosines up to their sign, rounded."""
    found: Array = np.degrees(np.arccos(np.minimum(np.abs(cosines), 1.0)))
    return found.round(_DECIMALS)


def _rows(one: Tree, measure: Proximity) -> Array:
    """Returns a signature's vectors, shape (m, d); of ``subspaces`` an orthonormal basis of their span."""
    vectors: Array = one["vectors"].cpu().numpy()
    return np.ascontiguousarray((leading_vectors(vectors.T) if measure == "subspaces" else vectors).T)


def _starts(blocks: Sequence[Array]) -> list[int]:
    """Returns where each of some arrays begins in all of them together."""
    return [0, *accumulate(map(len, blocks[:-1]))]


def _by_rank(one: Tree) -> dict[tuple[int, int], Array]:
    """Returns a signature's vectors by class and rank."""
    vectors, classes = one["vectors"].cpu().numpy(), one["classes"].tolist()
    return {(label, place - classes.index(label)): vectors[:, place] for place, label in enumerate(classes)}
