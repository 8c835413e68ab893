"""Sums of values, in one process or delivered from others."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.params import Tree, leaves


def values(seed: int, size: int, low: float, high: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of either sign whose magnitudes are spread evenly over the powers of ten from low to high."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(size, generator=generator, dtype=torch.float64) * (high - low) + low
    signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1
    return (signs * 10**exponents).to(dtype)


def total(contributions: Sequence[Weighted]) -> ExactSum:
    result = ExactSum()
    for contribution in contributions:
        result.add(contribution)
    return result


def mean(contributions: Sequence[Weighted]) -> Tree:
    return total(contributions).mean()


def assert_same_bits(left: Tree, right: Tree) -> None:
    """Stricter than equality: signs of zeros count, and so do types and the order of leaves."""
    pairs = list(zip(leaves(left), leaves(right), strict=True))
    for (path, one), (other_path, other) in pairs:
        assert path == other_path
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), path
        else:
            assert np.float64(one).tobytes() == np.float64(other).tobytes(), path


def delivered(partial: ExactSum) -> ExactSum:
    """As Ray delivers it: pickle protocol 5, arrays out of band in read-only memory."""
    buffers: list[pickle.PickleBuffer] = []
    body = cloudpickle.dumps(partial, protocol=5, buffer_callback=buffers.append)
    frozen = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    assert all(view.readonly for view in frozen)
    received: ExactSum = pickle.loads(body, buffers=frozen)
    return received
