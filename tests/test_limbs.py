"""Sums in fixed point: how products become integers, and how trees are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl.aggregation import ExactSum, Weighted
from rayfl.limbs import Limbs, _chunks


@given(
    st.lists(st.floats(-(2.0**30), 2.0**30, width=32), min_size=1, max_size=9),
    st.integers(1, 2**20),
    st.integers(1, 5),
)
def test_integers_are_the_same_whether_read_off_the_bits_or_converted(
    numbers: list[float], weight: int, times: int
) -> None:
    tree, found = {"w": torch.tensor(numbers)}, []
    for bound in (0, 2**60):
        limbs = Limbs.of(tree, weight, bound if max(map(abs, numbers)) * weight < 2**30 else 2**60)
        for _ in range(times):
            limbs.add(tree, weight, bound if max(map(abs, numbers)) * weight < 2**30 else 2**60)
        assert limbs.shifts in (0, times + 1)
        limbs.carry()
        found.append(limbs)
    assert torch.equal(found[0].high, found[1].high)
    assert torch.equal(found[0].low, found[1].low)


def test_both_kinds_of_additions_in_one_sum() -> None:
    small, large = {"w": torch.tensor([0.3, -7.0])}, {"w": torch.tensor([2.0**36, -(2.0**35)])}
    running = ExactSum()
    for tree in (small, large, small):
        running.add(Weighted(tree, 3))
    assert running.limbs is not None
    assert running.limbs.shifts == 2
    assert torch.equal(
        running.mean()["w"].double(), ((2 * small["w"].double() + large["w"].double()) / 3).float().double()
    )


@pytest.mark.parametrize("sizes", [[], [3], [40_000, 1, 2, 70_000, 5], [1] * 50, [32768, 32768, 1]])
def test_chunks_are_all_elements_in_order(sizes: list[int]) -> None:
    vectors = list(torch.split(torch.arange(float(sum(sizes))), sizes))
    found = list(_chunks(vectors, 32768))
    assert torch.equal(torch.cat([torch.zeros(0), *found]), torch.arange(float(sum(sizes))))
    assert all(len(chunk) <= 32768 for chunk in found)
    assert len(found) <= 2 * (sum(sizes) // 32768) + 1 + sum(size > 32768 for size in sizes)
