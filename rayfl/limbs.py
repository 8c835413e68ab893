"""Sums of weighted trees in fixed point: integers, so that neither order nor grouping matters.

A product ``weight * value`` is formed in float64 (exact for float32 values and sample counts below 2^29),
then split into two integers in units of 2^-20 and 2^-72.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfl.params import leaves

HIGH_BITS = 20
_LOW_BITS = 72
_CARRY_BITS = _LOW_BITS - HIGH_BITS
# |low| <= 2^51 per contribution: after this many the carry moves up, long before an int64 can overflow.
CARRY_EVERY = 1024
HIGH_LIMIT = 2**63
# Elements worked on at a time, so that the intermediate float64 values stay in the cache.
_CHUNK = 32768
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


# Adding it to a float64 of less than 2^51 rounds that to an integer, which can then be read off the bits.
_SHIFT = 1.5 * 2.0**52
_SHIFT_AS_INTEGER = int.from_bytes(struct.pack("<d", _SHIFT), "little")


@dataclass
class Limbs:
    """A sum of vectors as two integers an element, and what all summands have in common.

    Attributes:
        high: the sum in units of 2^-20; and ``shifts`` times the integer that a shift is.
        low: the rest of the sum, in units of 2^-72; and the same.
        first: the first summand, to the bit; float32, or float64 where needed. None once no summand has anything in
            common with it, as is usual after training.
        alike: where all summands are as the first; None when that is.
        shifts: how often integers were added with their shifts; additions wrap around.
    """

    high: Tensor
    low: Tensor
    first: Tensor | None
    alike: Tensor | None
    shifts: int = 0

    @classmethod
    def of(cls, tree: Mapping[str, Any], weight: float, bound: int) -> Limbs:
        """The sum of a single summand; see :meth:`add`."""
        parts = [_vector(leaf) for _, leaf in sorted_leaves(tree)]
        kind = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
        first = torch.cat([torch.zeros(0, dtype=kind, device=device), *(part.to(device, kind) for part in parts)])
        high, low = torch.zeros_like(first, dtype=torch.int64), torch.zeros_like(first, dtype=torch.int64)
        limbs = cls(high, low, None, None)
        limbs.add(tree, weight, bound)
        limbs.first, limbs.alike = first, torch.ones_like(first, dtype=torch.bool)
        return limbs

    def add(self, tree: Mapping[str, Any], weight: float, bound: int) -> None:
        """Adds a tree of the same structure.

        Args:
            tree: its magnitudes must be within the range of ``high``.
            weight: a factor.
            bound: what the product does not exceed, in units of 2^-20.
        """
        device = self.high.device
        # Accelerators lose more to the launches than they win by the cache.
        chunk = _CHUNK if device.type == "cpu" else max(1, len(self.high))
        split = _Split(float(weight), min(chunk, len(self.high)), device, bound < _SHIFT / 3)
        start = 0
        for values in _chunks([_vector(leaf).to(device) for _, leaf in sorted_leaves(tree)], chunk):
            here = slice(start, start + len(values))
            split.add(values, self.high[here], self.low[here])
            if self.first is not None and self.alike is not None:
                self.alike[here].logical_and_(_same(self.first[here], values))
            start += len(values)
        self.shifts += split.shifted
        self._forget_the_first()

    def merge(self, other: Limbs) -> None:
        """Adds another sum."""
        device = self.high.device
        self.high.add_(other.high.to(device))
        self.low.add_(other.low.to(device))
        self.shifts += other.shifts
        if self.first is None or self.alike is None or other.first is None or other.alike is None:
            self.first = self.alike = None
            return
        self.alike.logical_and_(other.alike.to(device)).logical_and_(_same(self.first, other.first.to(device)))
        self._forget_the_first()

    def _forget_the_first(self) -> None:
        if self.alike is not None and not self.alike.any():
            self.first = self.alike = None

    def carry(self) -> None:
        """Moves what exceeds half a unit of ``high`` out of ``low``; the limbs of a sum are then unique."""
        if self.shifts:
            shift = _wrapped(self.shifts * _SHIFT_AS_INTEGER)
            self.high.sub_(shift)
            self.low.sub_(shift)
            self.shifts = 0
        excess = torch.add(self.low, 1 << (_CARRY_BITS - 1)).bitwise_right_shift_(_CARRY_BITS)
        self.high.add_(excess)
        self.low.sub_(excess.bitwise_left_shift_(_CARRY_BITS))

    def mean(self, weight: float) -> Tensor:
        """The sum over ``weight`` in float64; the common value where there is one."""
        self.carry()
        total = self.high.double().mul_(2.0**-HIGH_BITS).add_(self.low.double().mul_(2.0**-_LOW_BITS))
        mean = total.div_(weight)
        if self.first is None or self.alike is None:
            return mean
        return torch.where(self.alike, self.first.double(), mean)


class _Split:
    """Makes two integers of each product and adds them.

    Args:
        weight: the factor.
        size: the largest number of elements at a time.
        device: where they are.
        shifted: whether integers are read off the bits of shifted numbers, which is faster than to convert them.
    """

    def __init__(self, weight: float, size: int, device: torch.device, shifted: bool) -> None:
        self.shifted = shifted
        self._scale = weight * 2.0**HIGH_BITS
        self._product = torch.empty(size, dtype=torch.float64, device=device)
        self._rounded = torch.empty_like(self._product)
        self._integers = torch.empty_like(self._product, dtype=torch.int64)

    def add(self, values: Tensor, high: Tensor, low: Tensor) -> None:
        """Adds the products of some values."""
        size = len(values)
        fine, coarse = self._product[:size], self._rounded[:size]
        fine.copy_(values).mul_(self._scale)
        if self.shifted:
            torch.add(fine, _SHIFT, out=coarse)
            high.add_(coarse.view(torch.int64))
            fine.sub_(coarse.sub_(_SHIFT)).mul_(2.0**_CARRY_BITS).add_(_SHIFT)
            low.add_(fine.view(torch.int64))
            return
        limb = self._integers[:size]
        torch.round(fine, out=coarse)
        high.add_(limb.copy_(coarse))
        fine.sub_(coarse).mul_(2.0**_CARRY_BITS).round_()
        low.add_(limb.copy_(fine))


def _chunks(vectors: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """The elements of all vectors in order, about ``size`` at a time: large ones are cut, small ones joined."""
    waiting: list[Tensor] = []
    for vector in vectors:
        if sum(map(len, waiting)) + len(vector) > size and waiting:
            yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]
            waiting = []
        if len(vector) > size:
            yield from torch.split(vector, size)
        else:
            waiting.append(vector)
    if waiting:
        yield torch.cat(waiting) if len(waiting) > 1 else waiting[0]


def _same(one: Tensor, other: Tensor) -> Tensor:
    """Where two vectors agree to the bit, in the type of the first."""
    bits = _BITS[one.dtype]
    return one.view(bits) == other.to(one.dtype).view(bits)


def _wrapped(value: int) -> int:
    """The int64 that differs from ``value`` by a multiple of 2^64."""
    return (value + HIGH_LIMIT) % (2 * HIGH_LIMIT) - HIGH_LIMIT


def sorted_leaves(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Leaves in the order in which they lie in the limbs."""
    return sorted(leaves(tree), key=lambda pair: pair[0])


def _vector(leaf: Any) -> Tensor:
    """A leaf as a vector of float32 (float64 if it is that, or a number)."""
    if not isinstance(leaf, Tensor):
        return torch.tensor([leaf], dtype=torch.float64)
    flat = leaf.detach().reshape(-1)
    return flat if flat.dtype in _BITS else flat.float()
