"""Centered clipping against its recursion, what it remembers, and how far messages can move it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rayfl.aggregation.exact_sum import Weighted
from rayfl.messages.aggregation_rule import Known
from rayfl.messages.aggregators import CenteredClipping, NormBounding
from rayfl.params import Tree
from tests.support.toys import assert_close, assert_equal

RECEIVED = {"body/w": torch.tensor([[0.5, -1.0], [2.0, 0.0]]).double(), "b": torch.tensor(0.25).double()}


def as_tree(change: np.ndarray) -> Tree:
    w, b = torch.from_numpy(change[:4]).reshape(2, 2), torch.tensor(change[4])
    return {"body": {"w": RECEIVED["body/w"] + w}, "b": RECEIVED["b"] + b}


def change_of(tree: Tree) -> np.ndarray:
    w, b = tree["body"]["w"] - RECEIVED["body/w"], tree["b"] - RECEIVED["b"]
    return torch.cat([w.flatten(), b.reshape(1)]).numpy()


def drawn(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[Weighted]]:
    changes = np.random.default_rng(seed).normal(size=(count, 5))
    weights = np.arange(1.0, count + 1)
    sent = [Weighted(as_tree(change), int(weight)) for change, weight in zip(changes, weights, strict=True)]
    return changes, weights / weights.sum(), sent


def clipped(
    changes: np.ndarray, weights: np.ndarray, center: np.ndarray, radius: float | None, times: int
) -> np.ndarray:
    """The recursion of the paper, vector by vector."""
    for _ in range(times):
        norms = [float(np.linalg.norm(change - center)) for change in changes]
        tau = float(np.median(norms)) if radius is None else radius
        steps = [
            weight * min(1.0, tau / norm) * (change - center)
            for weight, change, norm in zip(weights, changes, norms, strict=True)
        ]
        center = center + np.sum(steps, 0)
    return center


@pytest.mark.parametrize("radius", [None, 0.7, 50.0])
@pytest.mark.parametrize("times", [1, 4])
def test_the_center_moves_as_in_the_paper_and_the_next_round_begins_there(radius: float | None, times: int) -> None:
    rule, memory, center = CenteredClipping(radius=radius, iterations=times), Tree(), np.zeros(5)
    for seed in range(3):
        changes, weights, sent = drawn(6, seed)
        center = clipped(changes, weights, center, radius, times)
        known = Known(memory=memory)
        found = rule.combine(sent, RECEIVED, known)
        np.testing.assert_allclose(change_of(found), center, atol=1e-12)
        memory = rule.memory_after(sent, RECEIVED, known, found)


def test_without_a_memory_each_round_begins_at_no_change() -> None:
    rule = CenteredClipping(radius=0.7, start="received")
    _, _, sent = drawn(6)
    found = rule.combine(sent, RECEIVED, Known())
    assert rule.memory_after(sent, RECEIVED, Known(), found) == {}
    forked = Known(memory=found)  # of a run that had one
    assert_equal(rule.combine(sent, RECEIVED, forked), found)
    # one step from no change is what bounded norms are
    assert_close(found, NormBounding(radius=0.7).combine(sent, RECEIVED), atol=1e-12)


def test_one_message_moves_the_result_by_its_share_of_the_radius() -> None:
    rule, (changes, _, _) = CenteredClipping(radius=0.3), drawn(10)
    base = [Weighted(as_tree(change), 1) for change in changes]
    before = change_of(rule.combine(base, RECEIVED))
    for size in (1e2, -1e8):
        attacked = [*base[:-1], Weighted(as_tree(np.full(5, size)), 1)]
        moved = np.linalg.norm(change_of(rule.combine(attacked, RECEIVED)) - before)
        assert moved <= 2 * 0.3 / 10 + 1e-9


def test_the_result_is_no_further_from_the_last_one_than_the_radius() -> None:
    rule, memory = CenteredClipping(radius=0.3, iterations=2), {"body": {"w": torch.ones(2, 2)}, "b": torch.ones(())}
    _, _, sent = drawn(5)
    found = change_of(rule.combine(sent, RECEIVED, Known(memory=memory)))
    assert 0 < np.linalg.norm(found - 1) <= 2 * 0.3 + 1e-12


def test_what_is_sent_in_other_shapes_than_before_has_no_memory() -> None:
    rule, memory = CenteredClipping(radius=0.3), {"body": {"w": torch.ones(3)}, "gone": torch.ones(2)}
    _, _, sent = drawn(5)
    assert_equal(rule.combine(sent, RECEIVED, Known(memory=memory)), rule.combine(sent, RECEIVED))
