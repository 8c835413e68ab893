"""Parts of a graph between which there are few edges."""

from __future__ import annotations

import heapq
from typing import Any

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


def plain_growing(near: list[set[int]], order: list[int], sizes: list[int]) -> list[int]:
    """Parts as they grow; every choice looks at all free nodes."""
    found = [-1] * len(near)
    for part, size in enumerate(sizes):
        for _ in range(size):
            free = [node for node in order if found[node] < 0]
            inside = {node: sum(found[other] == part for other in near[node]) for node in free}
            outside = {node: sum(found[other] < 0 for other in near[node]) for node in free}
            touched = [node for node in free if inside[node]]
            if touched:
                chosen = min(touched, key=lambda node: (outside[node] - inside[node], order.index(node)))
            else:
                chosen = min(free, key=lambda node: (outside[node], order.index(node)))
            found[chosen] = part
    return found


def plain_moving(near: list[set[int]], order: list[int], found: list[int], parts: int) -> None:
    most = max(int(1.1 * len(near) / parts), -(-len(near) // parts))
    for _ in range(10):
        for node in order:
            counts = [sum(found[other] == part for other in near[node]) for part in range(parts)]
            own = found[node]
            better = [p for p in range(parts) if counts[p] > counts[own] and found.count(p) < most]
            if better and found.count(own) > 1:
                found[node] = max(better, key=lambda part: counts[part])


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_those_of_plain_loops(seed: int) -> None:
    """Also where much of the graph is single nodes and pairs, so that many nodes have no neighbour in the part."""
    nodes, parts, generator = 40, 1 + seed % 6, np.random.default_rng(seed)
    edges = np.unique(np.sort(generator.integers(nodes, size=(5 + 3 * seed, 2)), 1), axis=0)
    near: list[set[int]] = [set() for _ in range(nodes)]
    for one, other in edges[edges[:, 0] != edges[:, 1]].tolist():
        near[one].add(other)
        near[other].add(one)
    order = np.random.default_rng(seed).permutation(nodes).tolist()
    sizes = [(part + 1) * nodes // parts - part * nodes // parts for part in range(parts)]
    expected = plain_growing(near, order, sizes)
    plain_moving(near, order, expected, parts)
    assert communities(edges, nodes, parts, np.random.default_rng(seed)).tolist() == expected


def test_nodes_without_edges_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 20,000 nodes have no edge; looking at all free nodes for each of them would be 10^8 looks."""
    looks, pop = 0, heapq.heappop

    def counted(heap: list[Any]) -> Any:
        nonlocal looks
        looks += 1
        return pop(heap)

    monkeypatch.setattr(heapq, "heappop", counted)
    nodes = 20_000
    edges = np.stack([np.arange(nodes // 2 - 1), np.arange(1, nodes // 2)], 1)
    found = communities(edges, nodes, 100, np.random.default_rng(0))
    assert np.bincount(found).tolist() == [200] * 100
    assert looks <= 4 * nodes
