"""Trees of tensors and their flat layout."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rayfl.params import (
    add_scaled,
    copy,
    from_leaves,
    from_numpy,
    inner_product,
    interpolate,
    leaves,
    map_leaves,
    num_bytes,
    squared_distance,
    squared_norm,
    subtract,
    tensors,
    to_numpy,
    weighted_sum,
    weighted_sums,
    zeros_like,
)
from tests.support.toys import assert_close, assert_equal
from tests.support.trees import tensors_of, trees


@given(trees(st.integers()))
def test_from_leaves_inverts_leaves(tree: dict[str, Any]) -> None:
    back = from_leaves(dict(leaves(tree)))
    assert back == tree
    assert list(leaves(back)) == list(leaves(tree))


@given(trees(tensors_of()))
def test_a_copy_shares_no_memory(tree: dict[str, Any]) -> None:
    twin = copy(tree)
    assert_equal(twin, tree)
    originals = {leaf.data_ptr() for leaf in tensors(tree) if leaf.numel()}
    for leaf in tensors(twin):
        assert leaf.data_ptr() not in originals
        leaf.fill_(7.0)
    assert not any((leaf == 7.0).any() for leaf in tensors(tree))


def test_a_copy_keeps_numbers_and_leaves_the_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    twin = copy({"a": {"w": weight * 2}, "n": 3})
    assert twin["n"] == 3
    assert not twin["a"]["w"].requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_interpolation_is_exact_at_both_ends(dtype: torch.dtype, as_tensor: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-30, 6, 500, dtype=torch.float64)
    start = {"w": (torch.randn(500, generator=generator, dtype=torch.float64) * scale).to(dtype)}
    end = {"w": (torch.randn(500, generator=generator, dtype=torch.float64) * scale.flip(0)).to(dtype)}
    at = [torch.tensor(c, dtype=torch.float64) if as_tensor else c for c in (0.0, 1.0, 0.25)]
    assert_equal(interpolate(start, end, at[0]), start)
    assert_equal(interpolate(start, end, at[1]), end)
    middle = interpolate(start, end, at[2])["w"]
    assert middle.dtype == dtype
    torch.testing.assert_close(middle, 0.75 * start["w"] + 0.25 * end["w"])


def test_arithmetic_goes_leaf_by_leaf() -> None:
    left = {"a": torch.tensor([1.0, 2.0]), "b": {"c": torch.tensor([[3.0]])}}
    right = {"a": torch.tensor([4.0, -1.0]), "b": {"c": torch.tensor([[0.5]])}}
    assert_equal(subtract(left, right), {"a": torch.tensor([-3.0, 3.0]), "b": {"c": torch.tensor([[2.5]])}})
    assert_equal(add_scaled(left, right, 2.0), {"a": torch.tensor([9.0, 0.0]), "b": {"c": torch.tensor([[4.0]])}})
    assert inner_product(left, right) == 1 * 4 - 2 * 1 + 3 * 0.5
    assert squared_norm(left) == 14
    assert squared_distance(left, right) == 9 + 9 + 6.25
    assert_equal(zeros_like(left), {"a": torch.zeros(2), "b": {"c": torch.zeros(1, 1)}})
    assert num_bytes({**left, "n": 1.5}) == 12 + 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weighted_sum_is_taken_in_float64_and_leaves_out_what_has_no_weight(dtype: torch.dtype) -> None:
    trees = [{"a": {"w": torch.tensor([0.1 * k, 1e8 + k], dtype=dtype)}} for k in range(3)]
    found = weighted_sum(trees, [0.25, 0.5, 0.25])["a"]["w"]
    wide = torch.stack([tree["a"]["w"].double() for tree in trees])
    assert found.dtype == dtype
    assert torch.equal(found, (torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64) @ wide).to(dtype))
    broken = {"a": {"w": torch.full((2,), float("nan"), dtype=dtype)}}
    assert_equal(weighted_sum([broken, trees[1]], [0, 1.0]), trees[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cached", [1, 7, 1 << 15])
def test_several_weighted_sums_are_those_of_each_row(
    dtype: torch.dtype, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfl.params._CACHED_NUMBERS", cached)
    drawn = torch.Generator().manual_seed(0)
    trees = [
        {"a": {"w": torch.randn(3, 2, generator=drawn, dtype=dtype)}, "b": torch.randn((), generator=drawn).to(dtype)}
        for _ in range(5)
    ]
    weights = torch.rand(4, 5, generator=drawn, dtype=torch.float64)
    weights[:, 2] = 0
    weights[3] = torch.eye(5)[1]
    found = weighted_sums(trees, weights)
    assert len(found) == 4
    for tree, row in zip(found, weights.tolist(), strict=True):
        assert_close(tree, weighted_sum(trees, row), 1e-15 if dtype == torch.float64 else 1e-7)
    assert_equal(found[3], trees[1])
    assert weighted_sums(trees, weights[:0]) == []


def test_corresponding_leaves_are_found_by_name_not_by_order() -> None:
    left, right = {"a": torch.tensor(1.0), "b": torch.tensor(10.0)}, {"b": torch.tensor(2.0), "a": torch.tensor(3.0)}
    assert_equal(subtract(left, right), {"a": torch.tensor(-2.0), "b": torch.tensor(8.0)})
    with pytest.raises(KeyError):
        map_leaves(torch.sub, left, {"a": torch.tensor(0.0)})


@settings(max_examples=50)
@given(trees(tensors_of()))
def test_arrays_and_back_is_a_copy(tree: dict[str, Any]) -> None:
    arrays = to_numpy(tree)
    for _, array in leaves(arrays):
        array.flags.writeable = False
    back = from_numpy(arrays)
    assert_equal(back, tree)
    for (_, leaf), (_, array) in zip(leaves(back), leaves(arrays), strict=True):
        assert not np.shares_memory(leaf.numpy(), array)
        leaf.fill_(7.0)
    assert not any((leaf == 7.0).any() for leaf in tensors(tree))


def test_arrays_keep_types_and_numbers() -> None:
    tree = {"double": torch.tensor(0.1, dtype=torch.float64), "index": torch.tensor([1, 2]), "n": 3, "f": 0.5}
    tree["brain"], tree["one"] = torch.randn(3, 2).bfloat16().T, torch.tensor(-0.1, dtype=torch.bfloat16)
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(to_numpy(tree), protocol=5, buffer_callback=buffers.append)
    back = from_numpy(pickle.loads(body, buffers=[buffer.raw().toreadonly() for buffer in buffers]), made={})
    assert_equal(back, tree)
    assert {k: v.dtype for k, v in back.items() if isinstance(v, Tensor)} == {
        "double": torch.float64,
        "index": torch.int64,
        "brain": torch.bfloat16,
        "one": torch.bfloat16,
    }
