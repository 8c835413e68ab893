"""Fixed point: products as two integers in units of 2^-20 and 2^-72, and sums of such integers.

A product ``weight * value`` is formed in float64 (exact for float32 values and sample counts below 2^29), then split.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Vector = Tensor | np.ndarray

HIGH_BITS = 20
LOW_BITS = 72
_CARRY_BITS = LOW_BITS - HIGH_BITS
# |low| <= 2^51 per contribution: after this many the carry moves up, long before an int64 can overflow.
CARRY_EVERY = 1024
HIGH_LIMIT = 2**63
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


# Adding it to a float64 of less than 2^51 rounds that to an integer, which can then be read off the bits.
_SHIFT = 1.5 * 2.0**52
_SHIFT_AS_INTEGER = int.from_bytes(struct.pack("<d", _SHIFT), "little")


def is_shifted(bound: int) -> bool:
    """Whether integers up to ``bound`` are read off the bits of shifted numbers: faster than to convert them."""
    return bound < _SHIFT / 3


class Scratch:
    """Makes two integers of each product and adds them.

    Args:
        size: the largest number of elements at a time.
        device: where they are.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._product = torch.empty(size, dtype=torch.float64, device=device)
        self._rounded = torch.empty_like(self._product)
        self._integers = torch.empty_like(self._product, dtype=torch.int64)

    def add(self, values: Tensor, weight: float, shifted: bool, high: Tensor, low: Tensor) -> None:
        """Adds ``weight * values`` to the two integers; ``shifted``: see :func:`is_shifted`."""
        size = len(values)
        fine, coarse = self._product[:size], self._rounded[:size]
        fine.copy_(values).mul_(weight * 2.0**HIGH_BITS)
        if shifted:
            torch.add(fine, _SHIFT, out=coarse)
            add_integers(high, coarse.view(torch.int64))
            fine.sub_(coarse.sub_(_SHIFT)).mul_(2.0**_CARRY_BITS).add_(_SHIFT)
            add_integers(low, fine.view(torch.int64))
            return
        limb = self._integers[:size]
        torch.round(fine, out=coarse)
        add_integers(high, limb.copy_(coarse))
        fine.sub_(coarse).mul_(2.0**_CARRY_BITS).round_()
        add_integers(low, limb.copy_(fine))


def added(vectors: Sequence[Vector], here: slice, device: torch.device) -> Tensor:
    """Some elements of several vectors of integers, added up in fresh memory."""
    if device.type == "cpu" and len(vectors) > 1:
        one, other, *rest = (vector.numpy() if isinstance(vector, Tensor) else vector for vector in vectors)
        integers = one[here] + other[here]
        for array in rest:
            np.add(integers, array[here], out=integers)
        return torch.from_numpy(integers)
    total: Tensor = fresh(piece(vectors[0], here, device))
    for vector in vectors[1:]:
        total.add_(piece(vector, here, device))
    return total


def carry(high: Tensor, low: Tensor, shifts: int) -> None:
    """Takes off what shifts have left, and moves what exceeds half a unit of ``high`` out of ``low``, in place."""
    half, shift = 1 << (_CARRY_BITS - 1), _wrapped(shifts * _SHIFT_AS_INTEGER)
    if high.device.type == "cpu":
        _carry_arrays(high.numpy(), low.numpy(), half, shift)
        return
    high.sub_(shift)
    low.sub_(shift)
    excess = torch.add(low, half).bitwise_right_shift_(_CARRY_BITS)
    high.add_(excess)
    low.sub_(excess.bitwise_left_shift_(_CARRY_BITS))


def _carry_arrays(high: np.ndarray, low: np.ndarray, half: int, shift: int) -> None:
    """The same by NumPy, see below."""
    if shift:
        np.subtract(high, shift, out=high)
        np.subtract(low, shift, out=low)
    excess = low + half
    np.right_shift(excess, _CARRY_BITS, out=excess)
    np.add(high, excess, out=high)
    np.left_shift(excess, _CARRY_BITS, out=excess)
    np.subtract(low, excess, out=low)


def fresh(vector: Vector | None) -> Any:
    """A copy as a tensor."""
    if vector is None:
        return None
    return vector.clone() if isinstance(vector, Tensor) else torch.tensor(vector)


def piece(vector: Vector | None, here: slice, device: torch.device) -> Tensor:
    """Some elements as a tensor on ``device``; of a read-only array a copy."""
    assert vector is not None
    return vector[here].to(device) if isinstance(vector, Tensor) else torch.tensor(vector[here], device=device)


# On CPUs NumPy takes a fraction of PyTorch's time to add or compare integers, and to find a true one.


def add_integers(total: Tensor, integers: Tensor) -> None:
    """Adds in place."""
    if total.device.type == "cpu":
        np.add(total.numpy(), integers.numpy(), out=total.numpy())
    else:
        total.add_(integers)


def same(one: Tensor, other: Tensor) -> Tensor:
    """Where two vectors agree to the bit, in the type of the first."""
    bits = BITS[one.dtype]
    one, other = one.view(bits), other.to(one.dtype).view(bits)
    return torch.from_numpy(one.numpy() == other.numpy()) if one.device.type == "cpu" else one == other


def any_true(mask: Tensor) -> bool:
    """Whether a mask is anywhere true."""
    return bool(mask.numpy().any() if mask.device.type == "cpu" else mask.any())


def _wrapped(value: int) -> int:
    """The int64 that differs from ``value`` by a multiple of 2^64."""
    return (value + HIGH_LIMIT) % (2 * HIGH_LIMIT) - HIGH_LIMIT
