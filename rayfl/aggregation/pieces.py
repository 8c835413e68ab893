"""Sums that are sent in pieces, so that the receiver adds one piece while the next is in transit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rayfl.aggregation.exact_sum import ExactSum, nbytes_of
from rayfl.aggregation.fixed_point import CPU, same, zeros
from rayfl.aggregation.limbs import Limbs

_ELEMENT_BYTES = nbytes_of({"": None})


@dataclass(frozen=True)
class Piece:
    """A stretch of a sum.

    Attributes:
        start: its first element.
        limbs: of its elements, on the CPU.
    """

    start: int
    limbs: Limbs


def without_limbs(total: ExactSum) -> ExactSum:
    """Returns a sum without its limbs, which are sent in pieces; a sum of a single contribution stays whole."""
    return total if total.count < 2 else replace(total, waiting=[], limbs=None, received=[])


def stretches_of(head: ExactSum, size: int) -> Iterator[tuple[int, int]]:
    """The elements of a sum's pieces, from the first to before the last; none of a sum of a single contribution.

    Args:
        head: the sum, as of :func:`without_limbs` or whole.
        size: bytes of a piece, about, of those that a sum has by :func:`nbytes_of`.
    """
    if head.count < 2:
        return
    elements = nbytes_of(head.template) // _ELEMENT_BYTES
    each = max(size // _ELEMENT_BYTES, 1)
    yield from ((start, min(start + each, elements)) for start in range(0, elements, each))


def piece_of(total: ExactSum, start: int, stop: int) -> Piece:
    """A piece of a sum of several contributions, which stays as it is.

    Args:
        total: the sum.
        start: its first element.
        stop: the element after its last.
    """
    limbs, here = total.joined().on(CPU), slice(start, stop)
    common = None if limbs.common is None else (limbs.common[0][here], limbs.common[1][here])
    return Piece(start, Limbs(limbs.high[here], limbs.low[here], common))


class Gathered:
    """A sum of sums that arrive one after the other, each in pieces, in any order of its pieces.

    It uses the memory of one sum, however many arrive.

    Attributes:
        total: the sum, which is whole once all pieces of what has begun were added.
    """

    def __init__(self) -> None:
        self.total = ExactSum()
        self._begun = False

    def begin(self, head: ExactSum) -> None:
        """Begins with a further sum, as of :func:`without_limbs`; a whole one may be given, too.

        Raises:
            OverflowError: when the magnitudes leave the fixed-point range.
            ValueError: when the trees are unlike.
        """
        whole = head.count < 2 or bool(head.received) or head.limbs is not None
        self.total.merge(head)
        limbs, self._begun = self.total.limbs, False
        if limbs is None and not whole:
            size = nbytes_of(self.total.template) // _ELEMENT_BYTES
            self.total.limbs, self._begun = Limbs(zeros(size, CPU), zeros(size, CPU), None), True

    def add(self, piece: Piece) -> None:
        """Adds a piece of what was begun last."""
        own, other = self.total.limbs, piece.limbs
        assert own is not None
        here = slice(piece.start, piece.start + len(other.high))
        own.high[here] += other.high
        own.low[here] += other.low
        if self._begun and other.common is not None:
            if own.common is None:
                own.common = np.empty(len(own.high), other.common[0].dtype), np.ones(len(own.high), bool)
            own.common[0][here], own.common[1][here] = other.common
        elif other.common is None:
            own.common = None
        elif own.common is not None:
            first, alike = own.common
            alike[here] &= other.common[1] & same(first[here], other.common[0])
