"""Noise of sums over rounds that share it by binary trees, and what one client changes of what they noise.

Rounds are the leaves of a binary tree. A node stands for the rounds below it, of which there is a power of two, and has
noise of its own. The sum over the rounds up to t is made of as many nodes as t has ones in binary, and its noise is the
sum of theirs. A round is then released with the difference between its prefix's noise and that of the round before.

A node's noise is a function of seed, node and tensor. Nothing is stored: a round draws again what earlier ones drew.

Sources: Kairouz, McMahan, Song, Thakkar, Thakurta, Xu: Practical and Private (Deep) Learning without Sampling or
Shuffling, ICML 2021 (DP-FTRL); Honaker: Efficient Use of Differentially Private Binary Trees, TPDP 2015, for the
estimator that uses the nodes below a node, too. The papers' texts were not at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rayfl.randomness import RandomStreams

Draw = Callable[[str, tuple[int, ...]], np.ndarray]
"""``draw(path, shape) -> array`` of normal noise for a tensor, float64, independent in its elements."""


class Node(NamedTuple):
    """Rounds that share noise.

    Attributes:
        last: the last one, 0-indexed.
        size: how many there are, a power of two.
    """

    last: int
    size: int


def tree_noise(streams: RandomStreams, round: int, tree_rounds: int | None, every_node: bool) -> Draw:
    """Returns what draws the noise of a round, in multiples of the deviation of one node.

    Tensors of other names or shapes have independent noise, so that rounds whose messages differ in what they have are
    parts of what would be released if all of them had everything.

    Args:
        streams: the experiment's randomness.
        round: t, 0-indexed.
        tree_rounds: see :func:`shares`.
        every_node: see :func:`shares`.
    """
    found = shares(round, tree_rounds, every_node)

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        total = np.zeros(shape)
        for node, share in found.items():
            stream = f"privacy.tree.{node.size}.{path}.{shape}"
            total += share * streams.generator(stream, node.last).standard_normal(shape)
        return total

    return draw


def shares(round: int, tree_rounds: int | None, every_node: bool) -> dict[Node, float]:
    """Returns which nodes' noise a round has, and how often: the prefix's with it less the prefix's without it.

    One node is complete with the round. It takes the place of those of its rounds before: of 1, 2, 4, ... rounds.

    Args:
        round: t, 0-indexed.
        tree_rounds: a new tree begins after this number of rounds; None: there is one tree.
        every_node: whether a node's sum is estimated from it and all nodes below it (Honaker), or is its own alone.
    """
    place = 1 + (round if tree_rounds is None else round % tree_rounds)
    size = place & -place
    found = _estimate(Node(round, size), every_node)
    part = size // 2
    replaced = round - size + part  # the last round of the largest node that is replaced
    while part:
        for node, share in _estimate(Node(replaced, part), every_node).items():
            found[node] = found.get(node, 0.0) - share
        part //= 2
        replaced += part
    return found


def squared_sensitivity(attended: np.ndarray, tree_rounds: int | None, every_node: bool) -> int:
    """Returns the squared Euclidean norm of what one client changes of all complete nodes, in units of C^2.

    It is the sum over the nodes that are drawn of the square of how often the client takes part in their rounds. Nodes
    that no prefix is made of (right children) are drawn by Honaker's estimator alone.

    Args:
        attended: whether the client takes part in each round, shape (rounds,).
        tree_rounds: see :func:`shares`.
        every_node: see :func:`shares`.
    """
    rounds = len(attended)
    step = rounds if tree_rounds is None else tree_rounds
    total = 0
    for first in range(0, rounds, step or 1):
        counts = np.concatenate([[0], np.cumsum(attended[first : first + step], dtype=np.int64)])
        size = 1
        while size < len(counts):
            ends = np.arange(size, len(counts), size if every_node else 2 * size)
            total += int(((counts[ends] - counts[ends - size]) ** 2).sum())
            size *= 2
    return total


def _estimate(node: Node, every_node: bool) -> dict[Node, float]:
    """Returns the weights of nodes in the estimate of a node's sum.

    Honaker's estimate is the mean of a node's own noisy sum and of the sum of its children's estimates, weighted by
    the inverse of their variances. Its variance is 1 / (2 - 2^(1-h)) of the node's own, for a node of h levels.
    """
    if not every_node:
        return {node: 1.0}
    own, variance = [1.0], 1.0  # by level, from the leaves: the weight of a node's own sum
    while 1 << len(own) <= node.size:
        below = 2 * variance
        own.append(below / (1 + below))
        variance = own[-1]
    found, rest, size = {}, 1.0, node.size
    for weight in reversed(own):
        for last in range(node.last - node.size + size, node.last + 1, size):
            found[Node(last, size)] = rest * weight
        rest, size = rest * (1 - weight), size // 2
    return found
