"""Divide and conquer against the singular vectors of NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayfl.aggregation.exact_sum import Weighted
from rayfl.messages.aggregation_rule import Known
from rayfl.messages.aggregators import DivideAndConquer
from rayfl.params import Tree
from tests.support.toys import assert_equal

RECEIVED = {"w": torch.zeros(4, 5, dtype=torch.float64), "s": torch.tensor(1.0).double(), "b": torch.ones(9).double()}


def drawn(count: int, seed: int = 0) -> tuple[np.ndarray, list[Weighted]]:
    changes = np.random.default_rng(seed).normal(size=(count, 30))
    return changes, [Weighted(as_tree(change), k + 1) for k, change in enumerate(changes)]


def as_tree(change: np.ndarray) -> Tree:
    row = torch.from_numpy(change)
    return {"w": row[:20].reshape(4, 5), "s": 1 + row[20], "b": 1 + row[21:]}


def change_of(tree: Tree) -> np.ndarray:
    return torch.cat([tree["w"].flatten(), tree["s"].reshape(1) - 1, tree["b"] - 1]).numpy()


def left_out(changes: np.ndarray, dropped: int) -> list[int]:
    """The messages with the largest projections on the top right singular vector, by NumPy."""
    centered = changes - changes.mean(0)
    top = np.linalg.svd(centered)[2][0]
    return [int(k) for k in np.argsort((centered @ top) ** 2)[len(changes) - dropped :]]


@pytest.mark.parametrize(("filtered", "dropped"), [(1.0, 3), (1.5, 5), (0.5, 2)])
def test_messages_that_stand_out_are_left_out(filtered: float, dropped: int) -> None:
    changes, sent = drawn(9)
    out = left_out(changes, dropped)
    found = DivideAndConquer(malicious=3, filtered=filtered).combine(sent, RECEIVED)
    expected = changes[[k for k in range(9) if k not in out]].mean(0)
    np.testing.assert_allclose(change_of(found), expected, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 5])
def test_coordinates_are_drawn_in_each_iteration(seed: int) -> None:
    changes, sent = drawn(12, seed=3)
    generator = np.random.Generator(np.random.Philox(seed))
    times = np.zeros(12)
    for _ in range(6):
        chosen = np.sort(generator.choice(30, size=7, replace=False))
        times[left_out(changes[:, chosen], 2)] += 1
    rule = DivideAndConquer(malicious=2, coordinates=7, iterations=6)
    found = change_of(rule.combine(sent, RECEIVED, Known(seed=seed)))
    np.testing.assert_allclose(found, changes[times == times.min()].mean(0), atol=1e-12)


def test_where_all_have_been_left_out_once_those_that_were_so_least_often_are_kept() -> None:
    changes, sent = drawn(3)
    rule = DivideAndConquer(malicious=1, filtered=2, coordinates=1, iterations=25)
    generator = np.random.Generator(np.random.Philox(0))
    times = np.zeros(3)
    for _ in range(25):
        times[left_out(changes[:, generator.choice(30, size=1, replace=False)], 2)] += 1
    assert times.min() > 0
    found = change_of(rule.combine(sent, RECEIVED))
    np.testing.assert_allclose(found, changes[times == times.min()].mean(0), atol=1e-12)


@pytest.mark.parametrize("size", [3.0, 1e6])
def test_colluding_messages_are_found(size: float) -> None:
    changes, sent = drawn(15, seed=1)
    for k in (0, 6, 14):
        sent[k] = Weighted(as_tree(changes.mean(0) + size), 1)
    found = change_of(DivideAndConquer(malicious=3).combine(sent, RECEIVED))
    np.testing.assert_allclose(found, np.delete(changes, [0, 6, 14], 0).mean(0), atol=1e-9)


def test_another_seed_draws_other_coordinates() -> None:
    _, sent = drawn(12)
    rule = DivideAndConquer(malicious=4, coordinates=3)
    found = {change_of(rule.combine(sent, RECEIVED, Known(seed=seed))).tobytes() for seed in range(8)}
    assert len(found) > 1
    assert_equal(rule.combine(sent, RECEIVED, Known(seed=1)), rule.combine(sent, RECEIVED, Known(seed=1)))
