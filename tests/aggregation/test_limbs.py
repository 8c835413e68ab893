"""Sums in fixed point: how products become integers, and how trees are cut."""

from __future__ import annotations

import pickle
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl.aggregation import exact_sum as aggregation
from rayfl.aggregation import fixed_point
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.aggregation.fixed_point import CPU, HIGH_BITS, HIGH_LIMIT, NARROW, vector_of, zeros
from rayfl.aggregation.limbs import Limbs, Summand, mean_of
from rayfl.aggregation.magnitudes import NonFiniteError, check_finite, extremes_of, largest


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
    products = [(values, weight), (-values / 7, weight)]
    fits = 2 * float(values.abs().max()) * weight * 2**HIGH_BITS < NARROW
    for on_cpu, narrow in ((True, False), (False, False), (True, fits)):
        form = vector_of if on_cpu else torch.Tensor.clone
        high, low, mean = (form(torch.zeros(len(values), dtype=kind)) for kind in (torch.int64, torch.int64, float))
        for _ in range(times):
            fixed_point.add_products([(form(one), weight) for one, _ in products], high, low, narrow)
        fixed_point.mean_into(mean, high, low, 5 * weight)
        found.append(tuple(map(torch.as_tensor, (high, low, mean))))
    for one, *others in zip(*found, strict=True):
        assert all(torch.equal(one, other) for other in others)
    assert torch.equal(values, before)


@given(st.lists(st.floats(-(2.0**27), 2.0**27), min_size=1, max_size=9), st.integers(1, 7))
def test_narrow_products_have_the_bits_of_wide_ones(numbers: list[float], times: int) -> None:
    halves = [0.5 * 2.0**-HIGH_BITS, 1.5 * 2.0**-HIGH_BITS, 2.0**-73, -(2.0**-73), 3 * 2.0**-73, -0.0, 5e-324]
    values = np.array([*numbers, *halves, *(-number / 3 for number in numbers)])
    found = []
    for narrow in (True, False):
        high, low = (zeros(len(values), CPU) for _ in range(2))
        # In another order as well: what rounds up after one number may round down after another.
        for some in (values, values[::-1].copy()):
            fixed_point.add_products([(some, 1.0), (values, 1.0)] * times, high, low, narrow)
        fixed_point.carry(high, low)
        found.append((high, low))
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one, other)


def test_small_and_large_values_in_one_sum() -> None:
    small, large = {"w": torch.tensor([0.3, -7.0])}, {"w": torch.tensor([2.0**36, -(2.0**35)])}
    running = ExactSum()
    for tree in (small, large, small):
        running.add(Weighted(tree, 3))
    mean = running.mean()
    assert torch.equal(mean["w"].double(), ((2 * small["w"].double() + large["w"].double()) / 3).float().double())


@pytest.mark.parametrize("exponent", range(28, 31))
def test_products_around_the_range_of_the_quick_way_are_exact(exponent: int) -> None:
    """More elements than ``SMALL``, so that products are added piece by piece, and not as rows."""
    generator = torch.Generator().manual_seed(exponent)
    first, second = ((1 + torch.rand(2, 5000, generator=generator)) * 2.0**exponent).double()
    running = ExactSum()
    for leaf in (first, second, first + 2.0**-HIGH_BITS):
        running.add(Weighted({"w": leaf}))
    assert torch.equal(running.mean()["w"], (2 * first + second + 2.0**-HIGH_BITS) / 3)


def received(limbs: Limbs) -> Limbs:
    """As they come from another process: arrays that cannot be written to."""
    found = limbs.on(CPU, copy=True)
    for array in (found.high, found.low, *(found.common or ())):
        array.flags.writeable = False
    return found


@pytest.mark.parametrize("size", [3, 70_000])
def test_sums_of_other_processes_are_read_where_they_lie(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    trees = [{"w": torch.randn(size, generator=generator)} for _ in range(6)]
    for tree in trees:
        tree["w"][0] = 0.1  # what all have in common stays to the bit
    parts = [Limbs.of([Summand(tree, 3, NARROW) for tree in trees[i : i + 2]]) for i in (0, 2, 4)]
    merged = received(parts[0]).on(CPU, copy=True)
    merged.merge([received(part) for part in parts[1:]])
    expected = mean_of([Limbs.of([Summand(tree, 3, NARROW) for tree in trees])], 18.0)
    for found in ([merged], parts, [received(part) for part in parts], [parts[0], received(parts[1]), parts[2]]):
        assert torch.equal(mean_of(found, 18.0), expected)
    assert expected[0] == torch.tensor(0.1).double()
    with pytest.raises(AssertionError, match="another process"):
        received(parts[0]).add([Summand(trees[0], 3, NARROW)])


def test_what_is_waiting_and_what_was_received_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aggregation, "MAX_WAITING_BYTES", 100)
    monkeypatch.setattr(aggregation, "MANY_SMALL_BYTES", 100)
    monkeypatch.setattr(aggregation, "MAX_RECEIVED", 2)
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


def test_means_of_large_sums_are_divided_by_threads_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    tree = {"w": torch.randn(70_001, generator=generator)}
    other = {"w": torch.where(torch.rand(70_001, generator=generator) < 0.5, tree["w"], -tree["w"])}
    parts = [Limbs.of([Summand(one, 3, NARROW)]) for one in (tree, other)]
    alone = mean_of(parts, 6.0)
    monkeypatch.setattr(fixed_point, "MAX_THREADS", 3)
    monkeypatch.setattr(fixed_point, "ELEMENTS_PER_THREAD", 20_000)
    monkeypatch.setattr(fixed_point, "THREAD_CHUNK", 1_000)
    used = set()
    inner = fixed_point.carry

    def noted(high: np.ndarray, low: np.ndarray) -> None:
        used.add(threading.get_ident())
        time.sleep(0.001)
        inner(high, low)

    monkeypatch.setattr(fixed_point, "carry", noted)
    assert torch.equal(mean_of(parts, 6.0), alone)
    assert len(used) == 3
    assert parts[0].common is not None


def test_small_trees_are_added_as_rows_with_the_same_integers() -> None:
    """Every type of leaf, numbers, an empty tensor, negative zeros, and entries that all have in common."""
    generator = torch.Generator().manual_seed(5)
    trees = [
        {
            "b": torch.randn(7, generator=generator),
            "a": {"d": torch.randn(2, 3, generator=generator, dtype=torch.float64) * 1e6},
            "h": torch.randn(5, generator=generator).bfloat16(),
            "n": 0.1 * k,
            "none": torch.zeros(0),
            "same": torch.tensor([0.1, -0.0, 1e-30]),
        }
        for k in range(9)
    ]
    summands = [Summand(tree, 1 + k, HIGH_LIMIT) for k, tree in enumerate(trees)]
    together, alone = Limbs.of(summands), Limbs.of(summands[:1])
    for one in summands[1:]:
        alone.add([one])  # a single one is added as a vector
    for limbs in (together, alone):
        limbs.carry()
    assert np.array_equal(together.high, alone.high)
    assert np.array_equal(together.low, alone.low)
    assert together.common is not None
    assert alone.common is not None
    assert np.array_equal(together.common[1], alone.common[1])
    assert together.common[1].sum() == 3


def test_the_extremes_of_small_tensors_are_those_of_each() -> None:
    trees = [{"a": torch.randn(3, 2) * k, "b": torch.randn(4).half(), "i": torch.arange(3)} for k in range(1, 5)]
    trees[2]["a"][1, 0] = float("nan")
    known = extremes_of(trees)
    assert len(known) == 8
    for number, tree in enumerate(trees):
        for name in ("a", "b"):
            low, high = tree[name].aminmax()
            assert known[id(tree[name])] == (float(low), float(high)) or (number, name) == (2, "a")
        if number == 2:
            with pytest.raises(NonFiniteError, match="'a'"):
                check_finite(tree, known)
        else:
            assert largest(tree, known) == largest(tree)
