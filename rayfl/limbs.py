"""Sums of weighted trees in fixed point: integers, so that neither order nor grouping matters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfl.fixed_point import (
    BITS,
    HIGH_BITS,
    LOW_BITS,
    Scratch,
    Vector,
    add_integers,
    added,
    any_true,
    carry,
    fresh,
    is_shifted,
    piece,
    same,
)
from rayfl.params import leaves

# Elements worked on at a time, so that the intermediate float64 values stay in the cache.
_CHUNK = 32768


@dataclass(frozen=True)
class Summand:
    """A tree times a weight.

    Attributes:
        tree: its magnitudes must be within the range of ``high``.
        weight: a factor.
        bound: what no product exceeds, in units of 2^-20.
    """

    tree: Mapping[str, Any]
    weight: float
    bound: int


@dataclass
class Limbs:
    """A sum of vectors as two integers an element, and what all summands have in common.

    What came from another process are read-only NumPy arrays; only a sum of tensors can be added to.

    Attributes:
        high: the sum in units of 2^-20; and ``shifts`` times the integer that a shift is.
        low: the rest of the sum, in units of 2^-72; and the same.
        first: the first summand, to the bit; float32, or float64 where needed. None once no summand has anything in
            common with it, as is usual after training.
        alike: where all summands are as the first; None when that is.
        shifts: how often integers were added with their shifts; additions wrap around.
    """

    high: Vector
    low: Vector
    first: Vector | None
    alike: Vector | None
    shifts: int = 0

    @classmethod
    def of(cls, summands: Sequence[Summand]) -> Limbs:
        """A sum of one summand or more, of the same structure."""
        parts = [_vector(leaf) for _, leaf in sorted_leaves(summands[0].tree)]
        kind = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
        first = torch.cat([torch.zeros(0, dtype=kind, device=device), *(part.to(device, kind) for part in parts)])
        high, low = torch.zeros_like(first, dtype=torch.int64), torch.zeros_like(first, dtype=torch.int64)
        limbs = cls(high, low, first, torch.ones_like(first, dtype=torch.bool))
        limbs.add(summands)
        return limbs

    @classmethod
    def copied(cls, other: Limbs) -> Limbs:
        """The same as tensors of its own."""
        return cls(fresh(other.high), fresh(other.low), fresh(other.first), fresh(other.alike), other.shifts)

    def add(self, summands: Sequence[Summand]) -> None:
        """Adds trees of the same structure, all of them to one stretch of memory after the other."""
        high, low = _tensor(self.high), _tensor(self.low)
        scratch = Scratch(min(_stretch(high), len(high)), high.device)
        vectors = [[_vector(leaf).to(high.device) for _, leaf in sorted_leaves(one.tree)] for one in summands]
        start = 0
        for pieces in zip(*(_chunks(own, _stretch(high)) for own in vectors), strict=True):
            here = slice(start, start + len(pieces[0]))
            for one, values in zip(summands, pieces, strict=True):
                scratch.add(values, float(one.weight), is_shifted(one.bound), high[here], low[here])
                if self.first is not None and self.alike is not None:
                    _tensor(self.alike)[here].logical_and_(same(_tensor(self.first)[here], values))
            start = here.stop
        self.shifts += sum(is_shifted(one.bound) for one in summands)
        self._forget_the_first()

    def merge(self, others: Sequence[Limbs]) -> None:
        """Adds other sums."""
        high, low = _tensor(self.high), _tensor(self.low)
        known = self.first is not None and all(other.first is not None for other in others)
        for here in _stretches(high):
            for other in others:
                add_integers(high[here], piece(other.high, here, high.device))
                add_integers(low[here], piece(other.low, here, low.device))
                if known:
                    _tensor(self.alike)[here].logical_and_(_still_alike(self, other, here))
        self.shifts += sum(other.shifts for other in others)
        if not known:
            self.first = self.alike = None
        self._forget_the_first()

    def _forget_the_first(self) -> None:
        if self.alike is not None and not any_true(_tensor(self.alike)):
            self.first = self.alike = None

    def carry(self) -> None:
        """Moves what exceeds half a unit of ``high`` out of ``low``; the limbs of a sum are then unique."""
        high, low = _tensor(self.high), _tensor(self.low)
        for here in _stretches(high):
            carry(high[here], low[here], self.shifts)
        self.shifts = 0


def mean_of(parts: Sequence[Limbs], weight: float) -> Tensor:
    """The sum of all parts over ``weight`` in float64; where all summands have one value, that.

    Args:
        parts: one sum or more of the same structure; left as they are.
        weight: the total weight.
    """
    first = parts[0]
    device = first.high.device if isinstance(first.high, Tensor) else torch.device("cpu")
    mean = torch.empty(len(first.high), dtype=torch.float64, device=device)
    shifts = sum(part.shifts for part in parts)
    known = all(part.first is not None for part in parts)
    for here in _stretches(mean):
        high, low = (added([getattr(part, name) for part in parts], here, device) for name in ("high", "low"))
        carry(high, low, shifts)
        own = mean[here]
        own.copy_(high).mul_(2.0**-HIGH_BITS).add_(low.double().mul_(2.0**-LOW_BITS)).div_(weight)
        if known:
            alike = piece(first.alike, here, device)
            for part in parts[1:]:
                alike = alike & _still_alike(first, part, here, device)
            torch.where(alike, piece(first.first, here, device).double(), own, out=own)
    return mean


def _stretch(vector: Tensor) -> int:
    """Elements at a time; accelerators lose more to the launches than they win by the cache."""
    return _CHUNK if vector.device.type == "cpu" else max(1, len(vector))


def _stretches(vector: Tensor) -> Iterator[slice]:
    for start in range(0, len(vector), _stretch(vector)):
        yield slice(start, min(start + _stretch(vector), len(vector)))


def _tensor(vector: Vector | None) -> Tensor:
    assert isinstance(vector, Tensor), "a sum from another process cannot be added to"
    return vector


def _still_alike(one: Limbs, other: Limbs, here: slice, device: torch.device | None = None) -> Tensor:
    """Where the other's summands are all alike, and as the first of this one."""
    device = device or _tensor(one.high).device
    alike = same(piece(one.first, here, device), piece(other.first, here, device))
    return alike.logical_and_(piece(other.alike, here, device))


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


def sorted_leaves(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Leaves in the order in which they lie in the limbs."""
    return sorted(leaves(tree), key=lambda pair: pair[0])


def _vector(leaf: Any) -> Tensor:
    """A leaf as a vector of float32 (float64 if it is that, or a number)."""
    if not isinstance(leaf, Tensor):
        return torch.tensor([leaf], dtype=torch.float64)
    flat = leaf.detach().reshape(-1)
    return flat if flat.dtype in BITS else flat.float()
