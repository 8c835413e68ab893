"""A graph in parts of nearly equal size between which there are few edges."""

from __future__ import annotations

import heapq

import numpy as np

_PASSES = 10
_SLACK = 0.1
"""How much larger than the mean a part may grow while nodes move."""


def communities(edges: np.ndarray, nodes: int, parts: int, generator: np.random.Generator) -> np.ndarray:
    """Divides the nodes: parts grow one after the other, then nodes move to where more of their neighbours are.

    A part begins with a free node of the fewest free neighbours and takes, one by one, the free node with the most
    edges into it less those to other free nodes (greedy graph growing, with which METIS begins: Karypis and Kumar,
    1998). Then nodes, in random order, move to the part with the most of their neighbours as long as it has at most 1.1
    times the mean number of nodes, in at most 10 passes. Whole numbers alone are added, so that all machines find the
    same parts.

    Args:
        edges: distinct pairs of nodes, int of shape (E, 2), each in one direction.
        nodes: how many there are.
        parts: how many are wanted, at most ``nodes``.
        generator: of the order.

    Returns:
        The part of each node, int64 of shape (nodes,); each part has at least one node.
    """
    both = np.concatenate([edges, edges[:, ::-1]])
    both = both[both[:, 0] != both[:, 1]]
    both = both[np.argsort(both[:, 0], kind="stable")]
    begins = np.searchsorted(both[:, 0], np.arange(nodes + 1))
    near = [both[begins[node] : begins[node + 1], 1].tolist() for node in range(nodes)]
    order = generator.permutation(nodes).tolist()
    found = _grown(near, order, parts)
    _moved(near, order, found, parts)
    return np.array(found, dtype=np.int64)


def _grown(near: list[list[int]], order: list[int], parts: int) -> list[int]:
    found, nodes = [-1] * len(near), len(near)
    free = [len(neighbours) for neighbours in near]
    rank = {node: place for place, node in enumerate(order)}
    # Where a part may begin; an entry is outdated once its node is taken, or has fewer free neighbours.
    starts = [(free[node], place, node) for place, node in enumerate(order)]
    heapq.heapify(starts)
    for part in range(parts):
        size = (part + 1) * nodes // parts - part * nodes // parts
        inside: dict[int, int] = {}
        waiting: list[tuple[int, int, int]] = []
        for _ in range(size):
            node = -1
            while waiting and node < 0:
                gain, _, candidate = heapq.heappop(waiting)
                if found[candidate] < 0 and gain == free[candidate] - inside[candidate]:
                    node = candidate
            while node < 0:  # the part begins, or all that it leads to is taken
                count, _, candidate = heapq.heappop(starts)
                if found[candidate] < 0 and count == free[candidate]:
                    node = candidate
            found[node] = part
            for other in near[node]:
                free[other] -= 1
                if found[other] < 0:
                    inside[other] = inside.get(other, 0) + 1
                    heapq.heappush(starts, (free[other], rank[other], other))
            # How many edges a free node has to others that are free has changed for neighbours of the node alone.
            for other in near[node]:
                if found[other] < 0:
                    heapq.heappush(waiting, (free[other] - inside[other], rank[other], other))
    return found


def _moved(near: list[list[int]], order: list[int], found: list[int], parts: int) -> None:
    sizes = np.bincount(found, minlength=parts).tolist()
    most = max(int((1 + _SLACK) * len(near) / parts), -(-len(near) // parts))
    for _ in range(_PASSES):
        changed = False
        for node in order:
            own, count = found[node], dict[int, int]()
            for other in near[node]:
                count[found[other]] = count.get(found[other], 0) + 1
            better = [(-n, part) for part, n in count.items() if n > count.get(own, 0) and sizes[part] < most]
            if better and sizes[own] > 1:
                part = min(better)[1]
                found[node], changed = part, True
                sizes[own] -= 1
                sizes[part] += 1
        if not changed:
            return
