"""Sums of weighted trees in fixed point: integers, so that neither order nor grouping matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rayfl.aggregation.fixed_point import (
    BITS,
    CPU,
    NARROW,
    SMALL,
    Vector,
    add_products,
    add_rows,
    carry,
    compare,
    copied,
    device_of,
    mean_into,
    over_stretches,
    put,
    same,
    stretches,
    vector_of,
    zeros,
)
from rayfl.diagnosis.device_errors import free_device_memory, ran_out_of_memory
from rayfl.params import leaves

T = TypeVar("T")


@dataclass(frozen=True)
class Summand:
    """A tree times a weight.

    Attributes:
        tree: its magnitudes must be within the range of ``high``.
        weight: a factor.
        bound: upper bound of their product, in units of ``high``.
    """

    tree: Mapping[str, Any]
    weight: float
    bound: int


Common = tuple[Vector, Vector]
"""The first summand, to the bit (float32, or float64 where needed), and where all others are as it is."""


@dataclass
class Limbs:
    """A sum of vectors as two integers per element, and the values on which all summands agree.

    What came from another process is read-only; only a sum in memory of its own can be added to.

    Attributes:
        high: the sum in units of 2^-20.
        low: the rest of the sum, in units of 2^-72.
        common: values on which all summands agree; None if there are none, as is usual after training.
    """

    high: Vector
    low: Vector
    common: Common | None

    @classmethod
    def of(cls, summands: Sequence[Summand]) -> Limbs:
        """A sum of one summand or more, of the same structure; where they are, if there is room."""
        parts = [_flat(leaf) for _, leaf in sorted_leaves(summands[0].tree)]
        kind = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        size = sum(map(len, parts))

        def begin(device: torch.device) -> Limbs:
            # An empty part more, for trees without leaves.
            whole = [torch.empty(0, dtype=kind, device=device), *(part.to(device, kind) for part in parts)]
            common = vector_of(torch.cat(whole)), vector_of(torch.ones(size, dtype=torch.bool, device=device))
            return cls(zeros(size, device), zeros(size, device), common)

        device = next((part.device for part in parts if part.device.type != "cpu"), CPU)
        limbs = _if_there_is_room(lambda: begin(device), lambda: begin(CPU))
        limbs.add(summands)
        limbs._forget_the_first()
        return limbs

    def on(self, device: torch.device, copy: bool = False) -> Limbs:
        """Returns the limbs on a device; in memory of their own if that is another device, or ``copy`` is true."""

        def moved(vector: Vector) -> Vector:
            return copied(vector, device) if copy or device_of(vector) != device else vector

        common = None if self.common is None else (moved(self.common[0]), moved(self.common[1]))
        return Limbs(moved(self.high), moved(self.low), common)

    def add(self, summands: Sequence[Summand]) -> None:
        """Adds trees of the same structure: all of them to one stretch of memory after the other."""
        self._check_own()
        weights = [float(one.weight) for one in summands]
        if device_of(self.high) == CPU and len(summands) > 1 and len(self.high) <= SMALL:
            self._add_rows(summands, weights)
            return
        narrow = sum(one.bound for one in summands) <= NARROW
        start = 0
        for own in zip(*_vectors([one.tree for one in summands], device_of(self.high)), strict=True):
            stop = start + len(own[0])
            add_products(list(zip(own, weights, strict=True)), self.high[start:stop], self.low[start:stop], narrow)
            if self.common is not None:
                first, alike = self.common
                compare(first[start:stop], own, alike[start:stop])
            start = stop
        if isinstance(self.high, np.ndarray):  # elsewhere to ask is to wait
            self._forget_the_first()

    def _add_rows(self, summands: Sequence[Summand], weights: Sequence[float]) -> None:
        """Adds small trees, each a row of one array."""
        rows = _rows([one.tree for one in summands])
        add_rows(rows, np.asarray(weights), self.high, self.low)
        if self.common is not None:
            first, alike = self.common
            alike &= same(first, rows).all(0)
        self._forget_the_first()

    def merge(self, others: Sequence[Limbs]) -> None:
        """Adds other sums."""
        self._check_own()
        others = [other.on(device_of(self.high)) for other in others]
        for here in stretches(self.high):
            for other in others:
                self.high[here] += other.high[here]
                self.low[here] += other.low[here]
        self.common = _common([self, *others])
        self._forget_the_first()

    def _forget_the_first(self) -> None:
        if self.common is None:
            return
        alike = self.common[1]
        # It may as well be remembered.
        if not _if_there_is_room(lambda: bool(alike.any()), lambda: True):
            self.common = None

    def _check_own(self) -> None:
        own = isinstance(self.high, Tensor) or self.high.flags.writeable
        assert own, "a sum from another process cannot be added to"

    def carry(self) -> None:
        """Moves what exceeds half a unit of ``high`` out of ``low``; the limbs of a sum are then unique."""
        carry(self.high, self.low)


def mean_of(parts: Sequence[Limbs], weight: float) -> Tensor:
    """The sum of all parts over ``weight`` in float64; where all summands have one value, that.

    Args:
        parts: one sum or more of the same structure; left as they are.
        weight: the total weight.
    """
    device = device_of(parts[0].high)
    return _if_there_is_room(lambda: _mean_on(device, parts, weight), lambda: _mean_on(CPU, parts, weight))


def _mean_on(device: torch.device, parts: Sequence[Limbs], weight: float) -> Tensor:
    first, *others = (part.on(device) for part in parts)
    mean = torch.empty(len(first.high), dtype=torch.float64, device=device_of(first.high))
    found, common = vector_of(mean), _common([first, *others])
    highs, lows = ([getattr(part, limb) for part in (first, *others)] for limb in ("high", "low"))

    def divide(here: slice) -> None:
        high, low = (_total([vector[here] for vector in column]) for column in (highs, lows))
        mean_into(found[here], high, low, weight)
        if common is not None:
            put(found[here], *(vector[here] for vector in common))

    over_stretches(divide, found)
    return mean


def _total(vectors: Sequence[Vector]) -> Vector:
    """Returns the sum of vectors, in new memory."""
    first, second, *others = vectors if len(vectors) > 1 else (vectors[0], 0)
    total = first + second
    for other in others:
        total += other
    return total


def _common(parts: Sequence[Limbs]) -> Common | None:
    """Returns the values on which all summands of some sums agree."""
    known = [part.common for part in parts if part.common is not None]
    if len(known) < len(parts):
        return None
    (first, alike), *others = known
    for other, also in others:
        alike = alike & also & same(first, other)
    return first, alike


def _if_there_is_room(work: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """Returns the result of ``work`` or, where the device has too little memory for it, of ``otherwise``."""
    try:
        return work()
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
    free_device_memory()
    return otherwise()


def _vectors(trees: Sequence[Mapping[str, Any]], device: torch.device) -> list[list[Vector]]:
    """The leaves of each tree as they lie in the limbs; on accelerators in one piece if there is room for that."""
    found = [[_flat(leaf).to(device) for _, leaf in sorted_leaves(tree)] for tree in trees]
    if device != CPU:
        return _if_there_is_room(lambda: _in_one_piece(found), lambda: found)
    return [[vector_of(part) for part in own] for own in found]


def _in_one_piece(found: Sequence[Sequence[Tensor]]) -> list[list[Vector]]:
    """Each tree's vectors as one: in one launch for all trees, if they have one type."""
    if len(found[0]) < 2:
        return list(map(list, found))
    if len({part.dtype for part in found[0]}) > 1:
        return [[torch.cat(list(own))] for own in found]
    whole = torch.cat([part for own in found for part in own])
    return [[row] for row in whole.view(len(found), -1).unbind()]


def _rows(trees: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The leaves of trees of one structure as they lie in the limbs, float64 of shape (trees, n)."""
    found = [dict(leaves(tree)) for tree in trees]
    columns = [[tree[path] for tree in found] for path in sorted(found[0])]
    whole = [
        torch.stack([leaf.detach().to(CPU) for leaf in column]).reshape(len(trees), -1).double()
        if isinstance(column[0], Tensor)
        else torch.tensor(column, dtype=torch.float64)[:, None]
        for column in columns
    ]
    rows: np.ndarray = torch.cat([torch.empty(len(trees), 0, dtype=torch.float64), *whole], 1).numpy()
    return rows


def sorted_leaves(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Leaves in the order in which they lie in the limbs."""
    return sorted(leaves(tree), key=lambda pair: pair[0])


def _flat(leaf: Any) -> Tensor:
    """A leaf as a vector of float32 (float64 if it is that, or a number)."""
    if not isinstance(leaf, Tensor):
        return torch.tensor([leaf], dtype=torch.float64)
    flat = leaf.detach().reshape(-1)
    return flat if flat.dtype in BITS else flat.float()
