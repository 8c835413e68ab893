"""Sums of clients' contributions that stay apart from their host's result, to be merged before they travel.

Sums are exact: their bits do not depend on which host merges them, nor on the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.hosting.job import JobResult
from algorithms.clients import merge
from rayfl.aggregation.exact_sum import ExactSum, nbytes_of
from rayfl.aggregation.pieces import piece_of, without_limbs
from rayfl.params import num_bytes

LEAST_BYTES = 4 << 20
"""Smaller sums are with the driver sooner than another host could be told to merge them."""


@dataclass(frozen=True)
class Stretch:
    """Some elements of a sum.

    Attributes:
        group: which sum of a ``mean``; None: that of the clients' changes.
        start: the first element.
        stop: the element after the last.
    """

    group: str | None
    start: int
    stop: int


@dataclass
class PartialSums:
    """The sums of some clients' contributions.

    Attributes:
        totals: of a ``mean``, by group.
        updates: of the clients' changes and their squared norms.
    """

    totals: dict[str, ExactSum] = field(default_factory=dict)
    updates: ExactSum = field(default_factory=ExactSum)

    @property
    def nbytes(self) -> int:
        """About as many bytes as they have on their way."""
        return sum(_nbytes(total) for total in (*self.totals.values(), self.updates))


def taken_from(result: JobResult, least: int) -> PartialSums | None:
    """Takes the sums out of a result, which then says so; None if they are smaller than ``least`` bytes."""
    sums = PartialSums(result.totals, result.updates)
    if sums.nbytes < least:
        return None
    result.totals, result.updates, result.apart = {}, ExactSum(), True
    return sums


def merged(parts: Sequence[PartialSums], round: int, procedure: str) -> PartialSums:
    """The sums of several hosts as one.

    Args:
        parts: not used afterwards.
        round: for errors, 0-indexed.
        procedure: for errors.

    Raises:
        ClientError: when the clients' contributions make no sum together.
    """
    whole = PartialSums()
    for part in parts:
        for group, total in part.totals.items():
            merge(whole.totals.setdefault(group, ExactSum()), total, round, procedure)
        whole.updates.merge(part.updates)
    return whole


def part_of(sums: PartialSums, stretch: Stretch | None) -> JobResult:
    """A part of sums that travel to another machine.

    Args:
        sums: stay as they are.
        stretch: what of them; None: all that is not in stretches.
    """
    if stretch is None:
        heads = {group: without_limbs(total) for group, total in sums.totals.items()}
        return JobResult(totals=heads, updates=without_limbs(sums.updates))
    total = sums.updates if stretch.group is None else sums.totals[stretch.group]
    return JobResult(piece=(stretch.group, piece_of(total, stretch.start, stretch.stop)))


def _nbytes(total: ExactSum) -> int:
    if total.count == 1:
        return num_bytes(total.waiting[0].tree)
    return nbytes_of(total.template)
