"""Noise of trees against one that keeps its nodes, least squares over nodes, and the covariance of what is released."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfl.aggregation.tree_noise import shares, squared_sensitivity, tree_noise
from rayfl.randomness import RandomStreams

STREAMS = RandomStreams(5)
ROUNDS = 11


def blocks(first: int, last: int) -> list[tuple[int, int]]:
    """The largest aligned blocks of powers of two that the rounds from first (a multiple of all) up to last are."""
    found, at = [], first
    while at < last:
        size = 1
        while (at - first) % (2 * size) == 0 and at + 2 * size <= last:
            size *= 2
        found.append((at, at + size))
        at += size
    return found


def all_blocks(rounds: int, tree_rounds: int | None) -> Iterator[tuple[int, int]]:
    """All nodes of the trees over a number of rounds that are complete."""
    length = tree_rounds or rounds
    for begin in range(0, rounds, length):
        end = min(begin + length, rounds)
        for size in (2**level for level in range(9)):
            yield from ((at, at + size) for at in range(begin, end - size + 1, size))


def released(rounds: int, tree_rounds: int | None, every_node: bool) -> np.ndarray:
    """How the noise of each round is made of the independent noise of nodes, shape (rounds, nodes)."""
    found = [shares(round, tree_rounds, every_node) for round in range(rounds)]
    nodes = sorted({node for one in found for node in one})
    return np.array([[one.get(node, 0.0) for node in nodes] for one in found])


class StoredTree:
    """Draws every node's noise once, and keeps it."""

    def __init__(self, path: str, shape: tuple[int, ...]) -> None:
        self.noise: dict[tuple[int, int], np.ndarray] = {}
        self.path, self.shape = path, shape

    def prefix(self, rounds: int, tree_rounds: int | None) -> np.ndarray:
        """The noise of the sum over the first rounds: of all trees before, and of the blocks of the last one."""
        length = tree_rounds or rounds
        ends = [min(begin + length, rounds) for begin in range(0, rounds, length)]
        begins = range(0, rounds, length)
        parts = [block for begin, end in zip(begins, ends, strict=True) for block in blocks(begin, end)]
        for first, last in parts:
            if (first, last) not in self.noise:
                stream = f"privacy.tree.{last - first}.{self.path}.{self.shape}"
                self.noise[first, last] = STREAMS.generator(stream, last - 1).standard_normal(self.shape)
        return np.sum([self.noise[part] for part in parts], axis=0)


@pytest.mark.parametrize("tree_rounds", [None, 1, 4, 6])
def test_rounds_add_up_to_the_noise_of_a_tree_that_keeps_its_nodes(tree_rounds: int | None) -> None:
    tree, total = StoredTree("layer/weight", (2, 3)), np.zeros((2, 3))
    for round in range(ROUNDS):
        total = total + tree_noise(STREAMS, round, tree_rounds, every_node=False)("layer/weight", (2, 3))
        np.testing.assert_allclose(total, tree.prefix(round + 1, tree_rounds), atol=1e-12)


def test_a_sum_has_the_noise_of_as_many_nodes_as_its_length_has_ones() -> None:
    total = np.zeros(40_000)
    for round in range(ROUNDS):
        total = total + tree_noise(STREAMS, round, None, every_node=False)("a", (40_000,))
        assert total.var() == pytest.approx((round + 1).bit_count(), rel=0.05)


def test_a_tree_of_one_round_is_independent_noise() -> None:
    draws = [tree_noise(STREAMS, round, 1, every_node=False)("a", (2000,)) for round in range(6)]
    assert np.abs(np.corrcoef(draws) - np.eye(6)).max() < 0.1
    assert np.std(draws) == pytest.approx(1, rel=0.05)


def test_tensors_have_independent_noise_in_any_order() -> None:
    first, second = (tree_noise(STREAMS, 7, None, every_node=True) for _ in range(2))
    one, other = first("a", (500,)), first("b", (500,))
    np.testing.assert_array_equal(other, second("b", (500,)))
    np.testing.assert_array_equal(one, second("a", (500,)))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.2
    assert abs(np.corrcoef(one, first("a", (500, 1))[:, 0])[0, 1]) < 0.2  # of another shape


@pytest.mark.parametrize("tree_rounds", [None, 5, 8])
def test_honakers_estimate_is_that_of_least_squares(tree_rounds: int | None) -> None:
    """Of each block that a prefix is made of: from its own noisy sum and those of all blocks within it."""
    for rounds in range(1, 18):
        length = tree_rounds or rounds
        variance = 0.0
        for begin in range(0, rounds, length):
            for first, last in blocks(begin, min(begin + length, rounds)):
                size = last - first
                sums = np.array(
                    [[a <= leaf < b for leaf in range(size)] for a, b in all_blocks(size, None)], dtype=float
                )
                variance += float((np.ones(size) @ np.linalg.pinv(sums)) @ (np.ones(size) @ np.linalg.pinv(sums)))
        prefix = released(rounds, tree_rounds, every_node=True).sum(0)
        assert prefix @ prefix == pytest.approx(variance, rel=1e-9)
        simple = released(rounds, tree_rounds, every_node=False).sum(0)
        assert prefix @ prefix <= simple @ simple + 1e-9


def test_honakers_estimate_halves_the_variance_of_long_sums() -> None:
    prefix = released(64, None, every_node=True).sum(0)
    assert prefix @ prefix == pytest.approx(1 / (2 - 2.0**-6), rel=1e-12)


@pytest.mark.parametrize("tree_rounds", [None, 1, 3, 4, 6])
def test_a_clients_change_is_counted_in_every_node_for_all_ways_to_take_part(tree_rounds: int | None) -> None:
    rounds = 8
    nodes = list(all_blocks(rounds, tree_rounds))
    for attended in itertools.product([False, True], repeat=rounds):
        found = squared_sensitivity(np.array(attended), tree_rounds, every_node=True)
        assert found == sum(sum(attended[first:last]) ** 2 for first, last in nodes)


@pytest.mark.parametrize("tree_rounds", [None, 1, 3, 4, 6])
@pytest.mark.parametrize("rounds", [1, 2, 7, 8])
def test_a_clients_change_is_that_of_all_that_is_released_together(rounds: int, tree_rounds: int | None) -> None:
    """A client that changes rounds by u moves a normal vector of covariance S by u' S^-1 u, in squared deviations.

    With the tree alone that is the count over nodes to the last digit, so that no smaller one would be sound. What
    Honaker's estimator gives is made of all nodes, and can say less than these.
    """
    simple, every = (released(rounds, tree_rounds, every_node) for every_node in (False, True))
    together = np.linalg.inv(simple @ simple.T)
    most = np.abs(np.linalg.inv(every @ every.T))  # of changes in any directions
    for attended in itertools.product([False, True], repeat=rounds):
        change = np.array(attended)
        found, bound = (squared_sensitivity(change, tree_rounds, every_node) for every_node in (False, True))
        assert found == pytest.approx(float(change @ together @ change), rel=1e-9, abs=1e-9)
        assert float(change @ most @ change) <= bound * (1 + 1e-9)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 39), st.sampled_from([None, 5, 8]))
def test_to_take_part_less_often_costs_no_more(attended: list[bool], left_out: int, tree_rounds: int | None) -> None:
    whole = np.array(attended)
    part = whole & (np.arange(len(attended)) != left_out)
    for every_node in (False, True):
        less, more = (squared_sensitivity(one, tree_rounds, every_node) for one in (part, whole))
        assert less <= more


def test_one_participation_costs_as_many_nodes_as_the_tree_has_levels() -> None:
    for rounds, levels in ((1, 1), (2, 2), (3, 2), (4, 3), (100, 7), (128, 8)):
        alone = np.eye(rounds, dtype=bool)
        for every_node in (False, True):
            assert max(squared_sensitivity(one, None, every_node) for one in alone) == levels
