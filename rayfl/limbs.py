"""Sums of weighted trees in fixed point: integers, so that neither order nor grouping matters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfl.fixed_point import (
    BITS,
    Vector,
    add_integers,
    add_products,
    any_true,
    carry,
    fresh,
    mean_into,
    piece,
    same,
    stretches,
)
from rayfl.params import leaves


@dataclass(frozen=True)
class Summand:
    """A tree times a weight.

    Attributes:
        tree: its magnitudes must be within the range of ``high``.
        weight: a factor.
    """

    tree: Mapping[str, Any]
    weight: float


@dataclass
class Limbs:
    """A sum of vectors as two integers an element, and what all summands have in common.

    What came from another process are read-only NumPy arrays; only a sum of tensors can be added to.

    Attributes:
        high: the sum in units of 2^-20.
        low: the rest of the sum, in units of 2^-72.
        first: the first summand, to the bit; float32, or float64 where needed. None once no summand has anything in
            common with it, as is usual after training.
        alike: where all summands are as the first; None when that is.
    """

    high: Vector
    low: Vector
    first: Vector | None
    alike: Vector | None

    @classmethod
    def of(cls, summands: Sequence[Summand]) -> Limbs:
        """A sum of one summand or more, of the same structure."""
        parts = [_vector(leaf) for _, leaf in sorted_leaves(summands[0].tree)]
        kind = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
        size = sum(map(len, parts))
        high, low = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(2))
        limbs = cls(high, low, None, None)
        limbs._add(summands)
        if all(_agree(summands[0], one) for one in summands[1:]):
            limbs.first = torch.cat([part.to(device, kind) for part in parts]) if parts else high.to(kind)
            limbs.alike = torch.ones(size, dtype=torch.bool, device=device)
            limbs._compare(summands[1:])
        return limbs

    @classmethod
    def copied(cls, other: Limbs) -> Limbs:
        """The same as tensors of its own."""
        high, low = fresh(other.high), fresh(other.low)
        assert high is not None
        assert low is not None
        return cls(high, low, fresh(other.first), fresh(other.alike))

    def add(self, summands: Sequence[Summand]) -> None:
        """Adds trees of the same structure."""
        self._add(summands)
        self._compare(summands)

    def _add(self, summands: Sequence[Summand]) -> None:
        """All of them to one stretch of memory after the other."""
        high, low = _tensor(self.high), _tensor(self.low)
        start = 0
        for own in zip(*(_vectors(one.tree, high.device) for one in summands), strict=True):
            stop = start + len(own[0])
            own_high, own_low = high[start:stop], low[start:stop]
            for here in stretches(own_high):
                for one, values in zip(summands, own, strict=True):
                    add_products(values[here], float(one.weight), own_high[here], own_low[here])
            start = stop

    def _compare(self, summands: Sequence[Summand]) -> None:
        """Notes where they are not as the first."""
        for one in summands:
            if self.first is None:
                return
            values = torch.cat(_vectors(one.tree, _tensor(self.first).device))
            _tensor(self.alike).logical_and_(same(_tensor(self.first), values))
            self._forget_the_first()

    def merge(self, others: Sequence[Limbs]) -> None:
        """Adds other sums."""
        high, low = _tensor(self.high), _tensor(self.low)
        known = self.first is not None and all(other.first is not None for other in others)
        for here in stretches(high):
            for other in others:
                add_integers(high[here], other.high[here])
                add_integers(low[here], other.low[here])
                if known:
                    _tensor(self.alike)[here].logical_and_(_still_alike(self, other, here))
        if not known:
            self.first = self.alike = None
        self._forget_the_first()

    def _forget_the_first(self) -> None:
        if self.alike is not None and not any_true(_tensor(self.alike)):
            self.first = self.alike = None

    def carry(self) -> None:
        """Moves what exceeds half a unit of ``high`` out of ``low``; the limbs of a sum are then unique."""
        carry(_tensor(self.high), _tensor(self.low))


def mean_of(parts: Sequence[Limbs], weight: float) -> Tensor:
    """The sum of all parts over ``weight`` in float64; where all summands have one value, that.

    Args:
        parts: one sum or more of the same structure; left as they are.
        weight: the total weight.
    """
    first = parts[0]
    device = first.high.device if isinstance(first.high, Tensor) else torch.device("cpu")
    mean = torch.empty(len(first.high), dtype=torch.float64, device=device)
    known = all(part.first is not None for part in parts)
    for here in stretches(mean):
        high, low = (_added([getattr(part, name)[here] for part in parts], device) for name in ("high", "low"))
        own = mean[here]
        mean_into(own, high, low, weight)
        if known:
            alike = piece(first.alike, here, device)
            for part in parts[1:]:
                alike = alike & _still_alike(first, part, here, device)
            torch.where(alike, piece(first.first, here, device).double(), own, out=own)
    return mean


def _added(vectors: Sequence[Vector], device: torch.device) -> Tensor:
    """Vectors of integers added up, in fresh memory."""
    total = piece(vectors[0], slice(None), device).clone()
    for vector in vectors[1:]:
        add_integers(total, vector)
    return total


def _tensor(vector: Vector | None) -> Tensor:
    assert isinstance(vector, Tensor), "a sum from another process cannot be added to"
    return vector


def _still_alike(one: Limbs, other: Limbs, here: slice, device: torch.device | None = None) -> Tensor:
    """Where the other's summands are all alike, and as the first of this one."""
    device = device or _tensor(one.high).device
    alike = same(piece(one.first, here, device), piece(other.first, here, device))
    return alike.logical_and_(piece(other.alike, here, device))


def _agree(one: Summand, other: Summand) -> bool:
    """Whether two summands have any value in common."""
    pairs = zip(sorted_leaves(one.tree), sorted_leaves(other.tree), strict=True)
    return any(any_true(same(_vector(a), _vector(b))) for (_, a), (_, b) in pairs)


def _vectors(tree: Mapping[str, Any], device: torch.device) -> list[Tensor]:
    """The leaves as they lie in the limbs; on accelerators in one piece, to which few operations are done."""
    found = [_vector(leaf).to(device) for _, leaf in sorted_leaves(tree)]
    return found if device.type == "cpu" or len(found) < 2 else [torch.cat(found)]


def sorted_leaves(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Leaves in the order in which they lie in the limbs."""
    return sorted(leaves(tree), key=lambda pair: pair[0])


def _vector(leaf: Any) -> Tensor:
    """A leaf as a vector of float32 (float64 if it is that, or a number)."""
    if not isinstance(leaf, Tensor):
        return torch.tensor([leaf], dtype=torch.float64)
    flat = leaf.detach().reshape(-1)
    return flat if flat.dtype in BITS else flat.float()
