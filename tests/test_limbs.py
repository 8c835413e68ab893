"""Sums in fixed point: how products become integers, and how trees are cut."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl import aggregation, fixed_point
from rayfl.aggregation import ExactSum, Weighted
from rayfl.limbs import Limbs, Summand, mean_of


@given(
    st.lists(st.floats(-(2.0**20), 2.0**20, width=32), min_size=1, max_size=9),
    st.sampled_from([1, 7, 2**20, 0.3, 1e-9]),
    st.integers(1, 5),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_accelerators_have_the_bits_of_cpus(
    numbers: list[float], weight: float, times: int, dtype: torch.dtype
) -> None:
    values = torch.tensor(numbers, dtype=dtype) / 3
    before, found = values.clone(), []
    for device in ("cpu", "elsewhere"):
        high, low = (Elsewhere.of(torch.zeros(len(values), dtype=torch.int64), device) for _ in range(2))
        assert high.device.type == low.device.type == device
        for _ in range(times):
            fixed_point.add_products(values, weight, high, low)
            fixed_point.add_products(-values / 7, weight, high, low)
        mean = torch.empty(len(values), dtype=torch.float64)
        fixed_point.mean_into(mean, high, low, 5 * weight)
        found.append((torch.Tensor(high).clone(), torch.Tensor(low).clone(), mean))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(values, before)


class Elsewhere(torch.Tensor):
    """A tensor that says that it is not on the CPU."""

    @staticmethod
    def of(tensor: torch.Tensor, device: str) -> torch.Tensor:
        return tensor if device == "cpu" else tensor.as_subclass(Elsewhere)

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="elsewhere")


def test_small_and_large_values_in_one_sum() -> None:
    small, large = {"w": torch.tensor([0.3, -7.0])}, {"w": torch.tensor([2.0**36, -(2.0**35)])}
    running = ExactSum()
    for tree in (small, large, small):
        running.add(Weighted(tree, 3))
    mean = running.mean()
    assert torch.equal(mean["w"].double(), ((2 * small["w"].double() + large["w"].double()) / 3).float().double())


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
    parts = [Limbs.of([Summand(tree, 3) for tree in trees[i : i + 2]]) for i in (0, 2, 4)]
    merged = Limbs.copied(arrays(parts[0]))
    merged.merge([arrays(part) for part in parts[1:]])
    expected = mean_of([Limbs.of([Summand(tree, 3) for tree in trees])], 18.0)
    for found in ([merged], parts, [arrays(part) for part in parts], [parts[0], arrays(parts[1]), parts[2]]):
        assert torch.equal(mean_of(found, 18.0), expected)
    assert expected[0] == torch.tensor(0.1).double()
    with pytest.raises(AssertionError, match="another process"):
        arrays(parts[0]).add([Summand(trees[0], 3)])


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
