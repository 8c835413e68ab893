"""Partial sums that travel, and what a mean keeps of its contributions."""

from __future__ import annotations

import gc
import math
import pickle
import weakref
from collections.abc import Sequence

import cloudpickle
import pytest
import torch
from torch import Tensor

from rayfl.aggregation import exact_sum
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.aggregation.magnitudes import NonFiniteError, check_finite
from rayfl.params import Tree, copy, leaves
from tests.support.sums import assert_same_bits, delivered, mean, total, values
from tests.support.toys import assert_equal


def test_the_mean_may_be_taken_in_between() -> None:
    contributions = [Weighted({"w": values(k, 9, -5, 2)}, k + 1) for k in range(6)]
    running = ExactSum()
    for k, contribution in enumerate(contributions):
        running.add(contribution)
        assert_same_bits(running.mean(), mean(contributions[: k + 1]))


def test_the_mean_of_all_but_one() -> None:
    """It is the mean of the others, whichever way the sum was made; parts of a weight may be left out."""
    generator = torch.Generator().manual_seed(0)
    trees = [Weighted({"a": torch.randn(9, generator=generator), "b": 0.5 * k}, k + 1) for k in range(5)]

    def total(those: Sequence[Weighted]) -> ExactSum:
        found = ExactSum()
        for one in those:
            found.add(one)
        return found

    merged = total(trees[:2])
    merged.merge(pickle.loads(pickle.dumps(total(trees[2:]))))
    for k, one in enumerate(trees):
        others = total(trees[:k] + trees[k + 1 :]).mean()
        for found in (total(trees).mean_without(one), merged.mean_without(one)):
            assert_equal(found, others)
    assert_equal(merged.mean(), total(trees).mean())
    part = total(trees).mean_without(Weighted(trees[4].tree, 3))
    assert_equal(part, total([*trees[:4], Weighted(trees[4].tree, 2)]).mean())
    alone = total(trees[4:])
    assert_equal(alone.mean_without(Weighted(trees[4].tree, 2)), trees[4].tree)
    with pytest.raises(ValueError, match="no contributions"):
        alone.mean_without(trees[4])


def test_all_but_one_of_equal_contributions_are_that_value() -> None:
    tree = {"a": torch.tensor([1e-30, 3e-5, -7.0])}
    total = ExactSum()
    for _ in range(3):
        total.add(Weighted(tree))
    assert_equal(total.mean_without(Weighted(tree)), tree)


@pytest.mark.parametrize("clients", [1, 2, 4])
def test_partial_sums_travel_as_ray_delivers_them(clients: int) -> None:
    contributions = [Weighted({"a": {"w": values(k, 33, -9, 2)}, "n": k}, k + 1) for k in range(clients + 2)]
    received = delivered(total(contributions[:clients]))
    received.merge(delivered(total(contributions[clients:])))
    assert_same_bits(received.mean(), mean(contributions))
    added = delivered(total(contributions[:clients]))
    for contribution in contributions[clients:]:
        added.add(contribution)
    assert_same_bits(added.mean(), mean(contributions))


@pytest.mark.parametrize(("limit", "most"), [(1 << 30, 9), (0, 2)])
def test_how_many_received_sums_are_kept_apart(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large sums of other machines, few are in memory at a time, beside the one that they are added to."""

    class Buffer(bytearray):
        """Memory that can be asked after."""

    monkeypatch.setattr(exact_sum, "MAX_RECEIVED_BYTES", limit)
    contributions = [Weighted({"w": values(k, 5000, -3, 1)}, k + 1) for k in range(24)]
    living: list[weakref.ref[Buffer]] = []
    whole, peak = ExactSum(), 0
    for first in range(0, 24, 2):
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(total(contributions[first : first + 2]), protocol=5, buffer_callback=buffers.append)
        arrived = [Buffer(buffer.raw()) for buffer in buffers]
        living += [weakref.ref(buffer) for buffer in arrived]
        whole.merge(pickle.loads(body, buffers=[memoryview(buffer).toreadonly() for buffer in arrived]))
        del arrived
        gc.collect()
        peak = max(peak, sum(len(one) for one in (ref() for ref in living) if one is not None))
    assert peak == most * 5000 * 16
    assert_same_bits(whole.mean(), mean(contributions))


def test_partial_sums_travel_out_of_band() -> None:
    big = [Weighted({"w": values(k, 5000, -3, 1)}, 1) for k in range(3)]
    for contributions, bytes_a_parameter in ((big[:1], 4), (big, 16), (big[:1] * 2, 21)):
        buffers: list[pickle.PickleBuffer] = []
        body = cloudpickle.dumps(total(contributions), protocol=5, buffer_callback=buffers.append)
        assert len(body) < 3000
        assert sum(buffer.raw().nbytes for buffer in buffers) == 5000 * bytes_a_parameter


def test_inv_f6_nothing_is_aliased() -> None:
    trees = [{"w": torch.full((3,), float(k)), "d": torch.full((2,), 0.5 * k).double()} for k in (1, 2)]
    for count in (1, 2):
        running = total([Weighted(tree, 1) for tree in trees[:count]])
        mean, given_away = running.mean(), running.mean()
        expected = copy(mean)
        for tree in (*trees, given_away):
            for _, leaf in leaves(tree):
                leaf.add_(100.0)
        assert_same_bits(mean, expected)
        for tree in trees:
            for _, leaf in leaves(tree):
                leaf.sub_(100.0)


def test_a_contribution_is_not_changed() -> None:
    tree = {"w": values(0, 10, -3, 3, torch.float64)}
    before = copy(tree)
    running = ExactSum()
    for _ in range(3):
        running.add(Weighted(tree, 7))
    assert_same_bits(tree, before)


def test_types_and_shapes_come_back() -> None:
    def tree(k: int) -> Tree:
        return {
            "matrix": torch.full((2, 3), k + 0.5).t(),
            "scalar": torch.tensor(float(k), dtype=torch.float64),
            "half": torch.full((2,), float(k), dtype=torch.float16),
            "number": k,
            "float": 0.5 * k,
            "none": torch.zeros(0, 4),
        }

    result = mean([Weighted(tree(1), 1), Weighted(tree(4), 2)])
    assert_equal(result, {**tree(3), "number": 3.0, "float": 1.5})
    assert [leaf.dtype for _, leaf in leaves(result) if isinstance(leaf, Tensor)] == [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.float32,
    ]
    assert isinstance(result["number"], float)
    assert isinstance(mean([Weighted(tree(1))])["number"], float)


def test_the_order_of_keys_is_no_difference() -> None:
    one = {"a": torch.tensor([1.0]), "b": torch.tensor([10.0, 20.0]), "c": 1.0}
    other = {"c": 3.0, "b": torch.tensor([30.0, 40.0]), "a": torch.tensor([2.0])}
    expected = {"a": torch.tensor([1.5]), "b": torch.tensor([20.0, 30.0]), "c": 2.0}
    forward, backward = mean([Weighted(one), Weighted(other)]), mean([Weighted(other), Weighted(one)])
    assert_equal(forward, expected)
    assert_same_bits(forward, backward)
    left, right = total([Weighted(other)]), total([Weighted(one), Weighted(one)])
    left.merge(right)
    assert list(left.mean()) == list(forward)


def test_nothing_has_no_mean() -> None:
    with pytest.raises(ValueError, match="no contributions"):
        ExactSum().mean()
    assert mean([Weighted({}), Weighted({})]) == {}


def test_leaves_longer_than_a_chunk() -> None:
    trees = [{"w": values(k, 70_001, -6, 1), "b": values(k, 3, -6, 1)} for k in range(3)]
    whole = mean([Weighted(tree, k + 1) for k, tree in enumerate(trees)])
    for part in (slice(0, 10), slice(32_760, 32_780), slice(69_990, 70_001)):
        piece = mean([Weighted({"w": tree["w"][part]}, k + 1) for k, tree in enumerate(trees)])
        assert torch.equal(whole["w"][part], piece["w"])


def test_a_single_contribution_travels_in_any_type() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        one = ExactSum()
        one.add(Weighted({"w": torch.tensor([0.1, -3.0], dtype=dtype)}, 2))
        assert_equal(pickle.loads(pickle.dumps(one)).mean(), one.mean())


def test_finite_trees_pass_and_the_first_bad_leaf_is_named() -> None:
    check_finite(
        {"a": torch.ones(2), "i": torch.tensor([1, 2]), "none": torch.zeros(0), "n": 3, "b": torch.ones(()) > 0}
    )
    for bad in (math.nan, math.inf, -math.inf):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            leaf = torch.zeros(100, dtype=dtype)
            leaf[57] = bad
            with pytest.raises(NonFiniteError) as caught:
                check_finite({"a": {"fine": torch.ones(2)}, "b": {"bad": leaf}, "n": bad})
            assert caught.value.path == "b/bad"
        with pytest.raises(NonFiniteError, match="'n'"):
            check_finite({"n": bad})
