"""Fixed point: products as two integers in units of 2^-20 and 2^-72, and sums of such integers.

A product ``weight * value`` is formed in float64 (exact for float32 values and sample counts below 2^29), then split.
On CPUs vectors are NumPy's, which takes a fraction of PyTorch's time to round, add or compare integers, and to find a
true one; on accelerators they are tensors, with the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rayfl.diagnosis.device_errors import Pieces

Vector: TypeAlias = Any
"""An array on CPUs, a tensor on accelerators; one-dimensional."""

HIGH_BITS = 20
LOW_BITS = 72
_CARRY_BITS = LOW_BITS - HIGH_BITS
_CARRY = 2.0**_CARRY_BITS
_HALF = 1 << (_CARRY_BITS - 1)
# |low| <= 2^51 per contribution: after this many the carry moves up, long before an int64 can overflow.
CARRY_EVERY = 1024
HIGH_LIMIT = 2**63
NARROW = 2**51
# Numbers of up to 2^51 units of 1, and of 2^-52, round to these units when one adds such a number.
_ROUNDS_HIGH, _ROUNDS_LOW = 1.5 * 2.0**52, 1.5
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
CPU = torch.device("cpu")

SMALL = 4096
"""Elements of vectors of which several are added by :func:`add_rows`."""
# Elements worked on at a time, so that intermediate values stay in the cache.
_CHUNK = 16384
_ON_ACCELERATORS = 1 << 22
"""Elements of all summands that an accelerator works on at a time: some 150 MiB of intermediate values."""
THREAD_CHUNK = 1 << 16
"""Elements that a thread works on at a time."""
ELEMENTS_PER_THREAD = 1 << 21
"""Elements of a vector for each thread that works on it; a smaller vector has one."""
MAX_THREADS = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""Threads that work on a vector."""


def device_of(vector: Vector) -> torch.device:
    """Returns the device of a vector."""
    return vector.device if isinstance(vector, Tensor) else CPU


def vector_of(tensor: Tensor) -> Vector:
    """Returns the memory of a tensor as a vector."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def copied(vector: Vector, device: torch.device) -> Vector:
    """Returns a writable copy on ``device``."""
    if device.type == "cpu":
        return np.array(vector if isinstance(vector, np.ndarray) else vector.cpu())
    return vector.to(device, copy=True) if isinstance(vector, Tensor) else torch.tensor(vector, device=device)


def zeros(size: int, device: torch.device) -> Vector:
    """Returns a vector of zeros of type int64."""
    return vector_of(torch.zeros(size, dtype=torch.int64, device=device))


def stretches(vector: Vector) -> Iterator[slice]:
    """Splits a vector into blocks that fit the cache; on accelerators into one, since launches cost more."""
    size = _CHUNK if isinstance(vector, np.ndarray) else max(1, len(vector))
    for start in range(0, len(vector), size):
        yield slice(start, min(start + size, len(vector)))


def in_stretches(work: Callable[[slice], None], vector: Vector, summands: int = 1) -> None:
    """Does ``work`` on consecutive stretches of a vector, on accelerators as long as there is memory for.

    Args:
        work: changes nothing before it has computed everything.
        vector: of the length in question.
        summands: vectors of this length that the work is on; on accelerators more of them make shorter stretches.
    """
    if isinstance(vector, Tensor):
        Pieces("elements of a sum", max(_ON_ACCELERATORS // summands, 1)).over(len(vector), work)
        return
    for here in stretches(vector):
        work(here)


def over_stretches(work: Callable[[slice], None], vector: Vector) -> None:
    """Does ``work`` on all stretches of a vector, which are independent of each other; of a large one in threads.

    For a caller that has been waiting for others, so that there are idle cores. NumPy lets go of Python's lock while it
    computes, but to take it again costs time: the pieces are larger then.
    """
    threads = min(MAX_THREADS, len(vector) // ELEMENTS_PER_THREAD) if isinstance(vector, np.ndarray) else 1
    if threads < 2:
        in_stretches(work, vector)
        return
    starts = range(0, len(vector), THREAD_CHUNK)
    pieces = [slice(start, min(start + THREAD_CHUNK, len(vector))) for start in starts]

    def share(thread: int) -> None:
        for here in pieces[thread::threads]:
            work(here)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(share, range(threads)))


def add_products(products: Sequence[tuple[Vector, float]], high: Vector, low: Vector, narrow: bool) -> None:
    """Adds ``weight * values`` of all products to the two integers of each element, in place.

    Args:
        products: values, float32 or float64, shape (n,), and their weight.
        high: units of 2^-20, int64, shape (n,).
        low: units of 2^-72, int64, shape (n,).
        narrow: whether no sum of products exceeds :data:`NARROW` units of 2^-20; what the two stand for is the same,
            formed faster, but which of them has half a unit of ``high`` may differ before :func:`carry`.
    """
    factors = [(values, weight * 2.0**HIGH_BITS) for values, weight in products]
    add = _add_tensors if isinstance(high, Tensor) else _narrow_adder(len(high)) if narrow else _add_wide
    work = lambda here: add([(values[here], factor) for values, factor in factors], high[here], low[here])  # noqa: E731
    in_stretches(work, high, len(factors))


def add_rows(rows: np.ndarray, weights: np.ndarray, high: np.ndarray, low: np.ndarray) -> None:
    """Adds small summands to the two integers of each element, in place, with few calls; see :func:`add_products`.

    Args:
        rows: values, float64 of shape (summands, n).
        weights: of the summands, float64.
        high: units of 2^-20, int64, shape (n,).
        low: units of 2^-72, int64, shape (n,).
    """
    step = max(_CHUNK // max(len(high), 1), 1)
    for start in range(0, len(rows), step):
        fine = rows[start : start + step] * (weights[start : start + step] * 2.0**HIGH_BITS)[:, None]
        coarse = np.rint(fine)
        high += coarse.astype(np.int64).sum(0)
        fine -= coarse
        fine *= _CARRY
        low += np.rint(fine, out=fine).astype(np.int64).sum(0)


def _add_tensors(products: Sequence[tuple[Tensor, float]], high: Tensor, low: Tensor) -> None:
    """All products at a time: an accelerator takes as long to begin an operation as to add a small model."""
    fine = torch.stack([values for values, _ in products]).double()
    # As plain numbers: a tensor of them would be sent to the device, for which the host waits.
    torch._foreach_mul_(list(fine.unbind()), [factor for _, factor in products])
    coarse = fine.round()
    upper = coarse.long().sum(0)
    lower = fine.sub_(coarse).mul_(_CARRY).round_().long().sum(0)
    high.add_(upper)
    low.add_(lower)


def _add_wide(products: Sequence[tuple[np.ndarray, float]], high: np.ndarray, low: np.ndarray) -> None:
    for values, factor in products:
        fine = np.multiply(values, factor, dtype=np.float64)
        coarse = np.rint(fine)
        np.add(high, coarse.astype(np.int64), out=high)
        np.subtract(fine, coarse, out=fine)
        np.multiply(fine, _CARRY, out=fine)
        np.rint(fine, out=fine)
        np.add(low, fine.astype(np.int64), out=low)


def _narrow_adder(size: int) -> Callable[[Sequence[tuple[np.ndarray, float]], np.ndarray, np.ndarray], None]:
    """Returns a function that adds to both limbs without conversions between floats and integers.

    A float64 to which numbers are added, each rounded to units, counts these units in its last bits. What rounding
    leaves is exact.
    """
    scratch = np.empty((3, min(size, _CHUNK)))

    def add(products: Sequence[tuple[np.ndarray, float]], high: np.ndarray, low: np.ndarray) -> None:
        fine, total, further = scratch[:, : len(high)]
        total.fill(_ROUNDS_HIGH)
        for values, factor in products:
            np.multiply(values, factor, out=fine, dtype=np.float64)
            np.add(total, fine, out=further)
            np.subtract(total, further, out=total)
            np.add(fine, total, out=fine)
            np.add(fine, _ROUNDS_LOW, out=fine)
            np.add(low, fine.view(np.int64), out=low)
            total, further = further, total
        np.add(high, total.view(np.int64), out=high)
        np.subtract(high, _bits_of(_ROUNDS_HIGH, 1), out=high)
        np.subtract(low, _bits_of(_ROUNDS_LOW, len(products)), out=low)

    return add


def _bits_of(number: float, times: int) -> np.int64:
    """Returns ``times`` times the bits of a float64 as an integer; integers of 64 bits wrap around."""
    bits = times * int(np.float64(number).view(np.int64))
    return np.int64((bits + 2**63) % 2**64 - 2**63)


def carry(high: Vector, low: Vector) -> None:
    """Moves what exceeds half a unit of ``high`` out of ``low``, in place; the two are then unique."""

    def move(here: slice) -> None:
        excess = low[here] + _HALF
        excess >>= _CARRY_BITS
        high[here] += excess
        excess <<= _CARRY_BITS
        low[here] -= excess

    in_stretches(move, low)


def mean_into(mean: Vector, high: Vector, low: Vector, weight: float) -> None:
    """Writes sums over ``weight``, as of unique integers, to a vector of float64; ``high`` and ``low`` change."""
    carry(high, low)
    if isinstance(mean, Tensor):
        # A number would be turned into its reciprocal on some accelerators.
        mean.copy_(high).mul_(2.0**-HIGH_BITS).add_(low.double().mul_(2.0**-LOW_BITS)).div_(mean.new_tensor(weight))
        return
    np.multiply(high, 2.0**-HIGH_BITS, out=mean)
    np.add(mean, low * 2.0**-LOW_BITS, out=mean)
    np.divide(mean, weight, out=mean)


def same(one: Vector, other: Vector) -> Vector:
    """Returns where two vectors agree to the bit, in the type of the first."""
    if isinstance(one, Tensor):
        return one.view(BITS[one.dtype]) == other.to(one.dtype).view(BITS[one.dtype])
    bits = f"i{one.dtype.itemsize}"
    return one.view(bits) == np.asarray(other, one.dtype).view(bits)


def compare(first: Vector, others: Sequence[Vector], alike: Vector) -> None:
    """Clears ``alike`` wherever one of the other vectors is not as the first."""

    def clear(here: slice) -> None:
        left = alike[here]
        if isinstance(left, Tensor):
            left &= same(first[here], torch.stack([other[here] for other in others])).all(0)
            return
        for other in others:
            left &= same(first[here], other[here])
            if not left.any():
                break

    in_stretches(clear, first)


def put(target: Vector, values: Vector, mask: Vector) -> None:
    """Writes ``values`` where ``mask`` is true."""
    if isinstance(target, Tensor):
        torch.where(mask, values.to(target.dtype), target, out=target)
    else:
        np.copyto(target, values, where=mask)
