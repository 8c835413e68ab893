"""Subspaces that clients' samples span: their leading directions, and angles between those of two clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.parts.simplex import Array
from rayfl.params import Tree

Proximity = Literal["vectors", "subspaces", "sum"]
"""Which angle stands between two signatures; see :func:`angle`."""

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
    """Returns the angle of each signature to each of some others, in degrees; shape (len(signatures), len(others))."""
    left, right = ([_comparable(one, measure) for one in group] for group in (signatures, others))
    return np.array([[angle(one, other, measure) for other in right] for one in left]).reshape(len(left), len(right))


def proximity_matrix(signatures: Sequence[Tree], measure: Proximity) -> Array:
    """Returns the angles between signatures in degrees, symmetric with zeros on the diagonal; shape (K, K)."""
    found = np.zeros((len(signatures), len(signatures)))
    comparable = [_comparable(one, measure) for one in signatures]
    for i, j in combinations(range(len(signatures)), 2):
        found[i, j] = found[j, i] = angle(comparable[i], comparable[j], measure)
    return found


def angle(one: Mapping[tuple[int, int], Array], other: Mapping[tuple[int, int], Array], measure: Proximity) -> float:
    """Returns the angle between two clients in degrees, rounded; the signs of vectors do not matter.

    Args:
        one: a client's vectors by class and rank.
        other: another client's.
        measure: ``vectors``: the least angle between a vector of the one and a vector of the other. ``subspaces``: the
            smallest principal angle between the spans, of which the vectors are orthonormal bases. ``sum``: the sum of
            the angles between vectors of the same class and rank, with a right angle for each that only one has. For
            the first two a client without vectors is at a right angle to everybody.
    """
    if measure == "sum":
        pairs = one.keys() & other.keys()
        alone = len(one) + len(other) - 2 * len(pairs)
        cosines = np.array([one[key] @ other[key] for key in sorted(pairs)])
        return float(np.round(_degrees(cosines).sum() + RIGHT * alone, _DECIMALS))
    if not one or not other:
        return RIGHT
    products = np.stack(list(one.values())) @ np.stack(list(other.values())).T
    cosine = np.linalg.svd(products, compute_uv=False)[0] if measure == "subspaces" else np.abs(products).max()
    return float(_degrees(cosine))


def _degrees(cosines: Array) -> Array:
    """Returns the angles between 0 and 90 with these cosines up to their sign, rounded."""
    found: Array = np.degrees(np.arccos(np.minimum(np.abs(cosines), 1.0)))
    return found.round(_DECIMALS)


def _comparable(one: Tree, measure: Proximity) -> dict[tuple[int, int], Array]:
    """Returns a signature's vectors by class and rank; of ``subspaces`` an orthonormal basis of all vectors' span."""
    vectors, classes = one["vectors"].cpu().numpy(), one["classes"].tolist()
    if measure == "subspaces":
        vectors = leading_vectors(vectors.T)
        classes = [0] * vectors.shape[1]
    found: dict[tuple[int, int], Array] = {}
    for place, label in enumerate(classes):
        found[label, place - classes.index(label)] = vectors[:, place]
    return found
