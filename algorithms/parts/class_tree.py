"""Trees of classes: each node divides its classes into two sides, until every class is alone."""

from __future__ import annotations

from collections import deque

import numpy as np

from algorithms.parts.exchange import clustered


def class_tree(means: np.ndarray, present: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """The sides of a tree's nodes, float64 of shape (V, C): 1 and -1 for a node's two sides, 0 for what is not in it.

    A node of more than two classes is divided by 2-means of the classes' mean features, one of two classes by their
    order. V is one less than the number of classes that are present. Nodes come breadth first.

    Args:
        means: mean features by class, shape (C, f).
        present: which classes there are, bool of shape (C,).
        generator: seeds 2-means.
    """
    nodes, waiting = [], deque([np.flatnonzero(present)])
    while waiting:
        classes = waiting.popleft()
        if len(classes) < 2:
            continue
        first = _first_side(means[classes], generator)
        row = np.zeros(len(present))
        row[classes] = np.where(first, 1.0, -1.0)
        nodes.append(row)
        waiting += [classes[first], classes[~first]]
    return np.array(nodes).reshape(len(nodes), len(present))


def _first_side(means: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Which of at least two rows are on the first side, of which no side has none; bool."""
    if len(means) > 2:
        found = np.array(clustered(means, 2, generator))
        if found.any():
            first: np.ndarray = found == found[0]
            return first
    # two classes, or several of one mean
    return np.arange(len(means)) < len(means) // 2
