"""FINCH: clusters of points that are each other's first neighbours, without a number of clusters or a threshold."""

from __future__ import annotations

import numpy as np

from algorithms.parts.simplex import Array


def finch(points: Array, coarsest: bool = True) -> Array:
    """Returns the cluster of each point, shape (n,); clusters have numbers by their first members.

    In the first partition every point is in one cluster with its first neighbour, the one of the largest cosine (of
    equal ones the first). The clusters' means are points again, and so on. Each partition has at most half as many
    clusters as the one before.

    Args:
        points: shape (n, d); at least one. A point of length 0 has the cosine 0 with all.
        coarsest: take the last partition of more than one cluster, in place of the first partition. Where the first has
            one cluster only, it is that in both cases.

    References:
        Sarfraz, Sharma, Stiefelhagen: Efficient Parameter-free Clustering Using First Neighbor Relations, CVPR 2019.
    """
    clusters = _partition(points)
    while coarsest and clusters.max() > 0:
        merged = _partition(cluster_means(points, clusters))[clusters]
        if merged.max() == 0:
            break
        clusters = merged
    return clusters


def cluster_means(points: Array, clusters: Array) -> Array:
    """Means of the points of each cluster, shape (m, d)."""
    return np.stack([points[clusters == number].mean(0) for number in range(clusters.max() + 1)])


def _partition(points: Array) -> Array:
    if len(points) == 1:
        return np.zeros(1, dtype=np.int64)
    # takes a moment to import, and few runs need it
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    directions = points / np.where(lengths > 0, lengths, 1)
    cosines = directions @ directions.T
    np.fill_diagonal(cosines, -np.inf)
    places = np.arange(len(points))
    # Two points that share a first neighbour are linked too; both are linked to it.
    links = coo_array((np.ones(len(points)), (places, cosines.argmax(1))), shape=cosines.shape)
    found: Array = connected_components(links, directed=False)[1]
    return found
