"""Sums in fixed point: how products become integers, and how trees are cut."""

from __future__ import annotations

import pickle
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl import aggregation, fixed_point
from rayfl import kernels as kernels_module
from rayfl.aggregation import ExactSum, Weighted
from rayfl.kernels import compiled, loaded_kernels
from rayfl.limbs import Limbs, Summand, mean_of


@settings(deadline=None)
@given(
    st.lists(st.floats(-(2.0**30), 2.0**30, width=32), min_size=1, max_size=9),
    st.sampled_from([1, 7, 2**20, 0.3, 1e-9]),
    st.integers(1, 5),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_compiled_loops_give_the_bits_of_pytorch(
    numbers: list[float], weight: float, times: int, dtype: torch.dtype
) -> None:
    assert loaded_kernels() is not None
    summand, found = Summand({"w": torch.tensor(numbers, dtype=dtype) / 3}, weight), []
    for loops in (loaded_kernels, lambda: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fixed_point, "kernels", loops)
            limbs = Limbs.of([summand])
            for _ in range(times):
                limbs.add([summand, Summand({"w": -summand.tree["w"] / 7}, weight)])
            mean = mean_of([limbs, limbs], 5 * weight)
            limbs.carry()
            found.append((limbs.high, limbs.low, mean))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_loops_are_compiled_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    real = numba.njit

    def njit(loop: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(loop, **options)

    monkeypatch.setattr(numba, "njit", njit)
    loops = compiled()
    high, low = np.zeros(2, np.int64), np.zeros(2, np.int64)
    loops.add_products(np.array([1.5, -2.0]), 2.0, high, low)
    assert high.tolist() == [3, -4]


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if this process had not asked for the loops yet."""
    loaded_kernels()
    monkeypatch.setattr(kernels_module, "_loading", None)
    monkeypatch.setattr(kernels_module, "_loaded", None)
    return monkeypatch


def test_nobody_waits_for_the_loops(unloaded: pytest.MonkeyPatch) -> None:
    ready = threading.Event()
    unloaded.setattr(kernels_module, "compiled", lambda: ready.wait(20) and compiled())
    unloaded.setattr(kernels_module, "_spent", 0.0)
    summand = Summand({"w": torch.tensor([1.5])}, 2.0)
    assert mean_of([Limbs.of([summand])], 2.0).tolist() == [1.5]
    assert kernels_module._loading is None, "a short run does without"
    unloaded.setattr(kernels_module, "_WORTH_LOADING_S", 0.0)
    assert mean_of([Limbs.of([summand])], 2.0).tolist() == [1.5]
    assert kernels_module._loading is not None
    assert kernels_module.kernels() is None
    ready.set()
    assert loaded_kernels() is kernels_module.kernels() is not None
    assert mean_of([Limbs.of([summand])], 2.0).tolist() == [1.5]


def test_there_are_no_loops_without_numba(unloaded: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    unloaded.setitem(sys.modules, "numba", None)
    assert loaded_kernels() is None
    assert not caplog.text


def test_a_numba_that_does_not_work_is_told(unloaded: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise OSError("libllvmlite.so: wrong ELF class")

    unloaded.setattr(kernels_module, "compiled", broken)
    assert loaded_kernels() is None
    assert "Numba does not work here (OSError: libllvmlite.so" in caplog.text


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
