"""Parts of a graph between which there are few edges."""

from __future__ import annotations

import numpy as np
import pytest

from rayfl.data.communities import communities


def blocks(count: int, size: int, within: float, between: float, seed: int) -> np.ndarray:
    generator, nodes = np.random.default_rng(seed), count * size
    whose = np.arange(nodes) // size
    one, other = np.triu_indices(nodes, 1)
    chosen = generator.random(len(one)) < np.where(whose[one] == whose[other], within, between)
    return np.stack([one[chosen], other[chosen]], 1)


def test_planted_blocks_are_found() -> None:
    edges = blocks(4, 25, 0.4, 0.01, 0)
    found = communities(edges, 100, 4, np.random.default_rng(1))
    cut = (found[edges[:, 0]] != found[edges[:, 1]]).mean()
    planted = (edges[:, 0] // 25 != edges[:, 1] // 25).mean()
    assert cut <= planted + 0.01
    drawn = np.random.default_rng(0).permutation(100) % 4
    assert cut < 0.3 * (drawn[edges[:, 0]] != drawn[edges[:, 1]]).mean()


@pytest.mark.parametrize(("nodes", "parts"), [(30, 1), (30, 7), (30, 30), (31, 4)])
def test_parts_are_of_nearly_equal_size_and_none_is_empty(nodes: int, parts: int) -> None:
    generator = np.random.default_rng(nodes + parts)
    edges = np.unique(np.sort(generator.integers(nodes, size=(40, 2)), 1), axis=0)
    found = communities(edges, nodes, parts, np.random.default_rng(2))
    sizes = np.bincount(found, minlength=parts)
    assert found.shape == (nodes,) and len(sizes) == parts and sizes.min() >= 1
    assert sizes.max() <= max(1.1 * nodes / parts, np.ceil(nodes / parts))


def test_parts_are_the_same_for_a_seed_and_graphs_may_have_no_edge() -> None:
    edges = blocks(3, 10, 0.3, 0.1, 3)
    first, second = (communities(edges, 30, 3, np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(first, second)
    assert np.bincount(communities(np.empty((0, 2), int), 9, 3, np.random.default_rng(0))).tolist() == [3, 3, 3]
