"""Sums in fixed point: how products become integers, and how trees are cut."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl import aggregation
from rayfl.aggregation import ExactSum, Weighted
from rayfl.limbs import Limbs, Summand, _chunks, mean_of


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
        summand = Summand(tree, weight, bound if max(map(abs, numbers)) * weight < 2**30 else 2**60)
        limbs = Limbs.of([summand])
        for _ in range(times):
            limbs.add([summand])
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
    mean = running.mean()
    assert running.limbs is not None
    assert running.limbs.shifts == 2
    assert torch.equal(mean["w"].double(), ((2 * small["w"].double() + large["w"].double()) / 3).float().double())


@pytest.mark.parametrize("sizes", [[], [3], [40_000, 1, 2, 70_000, 5], [1] * 50, [32768, 32768, 1]])
def test_chunks_are_all_elements_in_order(sizes: list[int]) -> None:
    vectors = list(torch.split(torch.arange(float(sum(sizes))), sizes))
    found = list(_chunks(vectors, 32768))
    assert torch.equal(torch.cat([torch.zeros(0), *found]), torch.arange(float(sum(sizes))))
    assert all(len(chunk) <= 32768 for chunk in found)
    assert len(found) <= 2 * (sum(sizes) // 32768) + 1 + sum(size > 32768 for size in sizes)


def arrays(limbs: Limbs) -> Limbs:
    """As they come from another process: NumPy arrays that cannot be written to."""
    found = {name: value.numpy().copy() for name, value in vars(limbs).items() if isinstance(value, torch.Tensor)}
    for array in found.values():
        array.flags.writeable = False
    return Limbs(**{**vars(limbs), **found})


@pytest.mark.parametrize("size", [3, 70_000])
def test_sums_of_other_processes_are_read_where_they_lie(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    trees = [{"w": torch.randn(size, generator=generator)} for _ in range(6)]
    for tree in trees:
        tree["w"][0] = 0.1  # what all have in common stays to the bit
    parts = [Limbs.of([Summand(tree, 3, 2**25) for tree in trees[i : i + 2]]) for i in (0, 2, 4)]
    merged = Limbs.copied(arrays(parts[0]))
    merged.merge([arrays(part) for part in parts[1:]])
    expected = mean_of([Limbs.of([Summand(tree, 3, 2**25) for tree in trees])], 18.0)
    for found in ([merged], parts, [arrays(part) for part in parts], [parts[0], arrays(parts[1]), parts[2]]):
        assert torch.equal(mean_of(found, 18.0), expected)
    assert expected[0] == torch.tensor(0.1).double()
    with pytest.raises(AssertionError, match="another process"):
        arrays(parts[0]).add([Summand(trees[0], 3, 2**25)])


def test_what_is_waiting_and_what_was_received_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregation, "_WAITING_BYTES", 100)
    monkeypatch.setattr(aggregation, "_RECEIVED", 2)
    trees = [{"w": torch.full((10,), float(k))} for k in range(1, 9)]
    running = ExactSum()
    for tree in trees:
        running.add(Weighted(tree, 1))
        assert len(running.waiting) <= 3
    for _ in range(6):
        other = ExactSum()
        for tree in trees:
            other.add(Weighted(tree, 1))
        running.merge(pickle.loads(pickle.dumps(other)))
        assert len(running.received) <= 3
    assert torch.equal(running.mean()["w"], torch.full((10,), 4.5))
