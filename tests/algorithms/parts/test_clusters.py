"""Hierarchical clusters of clients, and the nearest of them."""

from __future__ import annotations

import numpy as np
import pytest

from algorithms.parts.clusters import Linkage, hierarchical_clusters, nearest_cluster
from algorithms.parts.simplex import Array

LINKAGES: tuple[Linkage, ...] = ("average", "weighted", "complete", "single")


def distances(count: int, seed: int) -> Array:
    points = np.random.default_rng(seed).normal(size=(count, 3))
    found: Array = np.linalg.norm(points[:, None] - points, axis=-1)
    return found


def merged(matrix: Array, linkage: Linkage, threshold: float, most: int | None) -> list[list[int]]:
    """The clusters by plain loops over a table of distances that shrinks."""
    clusters = [[k] for k in range(len(matrix))]
    table = {(i, j): float(matrix[i, j]) for i in range(len(matrix)) for j in range(len(matrix)) if i != j}
    names = list(range(len(matrix)))
    while len(names) > 1:
        (i, j), least = min(((pair, table[pair]) for pair in table if pair[0] < pair[1]), key=lambda one: one[1])
        if len(names) <= most if most is not None else least > threshold:
            break
        for k in set(names) - {i, j}:
            a, b, m, n = table[i, k], table[j, k], len(clusters[i]), len(clusters[j])
            new = {
                "average": (m * a + n * b) / (m + n),
                "weighted": (a + b) / 2,
                "complete": max(a, b),
                "single": min(a, b),
            }[linkage]
            table[i, k] = table[k, i] = new
        clusters[i] += clusters[j]
        names.remove(j)
        table = {pair: value for pair, value in table.items() if j not in pair}
    return sorted(sorted(clusters[k]) for k in names)


@pytest.mark.parametrize("linkage", LINKAGES)
@pytest.mark.parametrize("seed", range(6))
def test_clusters_are_those_of_merging_the_nearest_two(seed: int, linkage: Linkage) -> None:
    matrix = distances(9, seed)
    for threshold in (0.0, 0.5, 1.0, 1.7, 2.5, 9.0):
        assert hierarchical_clusters(matrix, linkage, threshold) == merged(matrix, linkage, threshold, None)
    for most in (1, 2, 4, 9, 20):
        assert hierarchical_clusters(matrix, linkage, 0.0, most) == merged(matrix, linkage, 0.0, most)


def test_clusters_at_the_threshold_are_merged_and_one_client_is_one_cluster() -> None:
    matrix = np.array([[0.0, 2.0], [2.0, 0.0]])
    assert hierarchical_clusters(matrix, "average", 2.0) == [[0, 1]]
    assert hierarchical_clusters(matrix, "average", 1.99) == [[0], [1]]
    assert hierarchical_clusters(np.zeros((1, 1)), "single", 0.0) == [[0]]


def test_the_nearest_cluster_is_the_linkages() -> None:
    row, clusters = np.array([1.0, 9.0, 3.0, 4.0, 5.0]), [0, 0, 1, 1, 2]
    found = {linkage: nearest_cluster(row, clusters, linkage) for linkage in LINKAGES}
    assert found == {"average": 1, "weighted": 1, "complete": 1, "single": 0}
    assert nearest_cluster(np.full(4, 90.0), [1, 0, 1, 2], "average") == 0
