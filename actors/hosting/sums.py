"""Merges the sums of several hosts of a machine before they are sent to the driver.

Sums are exact: their bits depend neither on the host that merges them nor on the order.
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
"""Sums below this size are sent to the driver at once: merging them first would take longer."""


@dataclass(frozen=True)
class SumRange:
    """A range of elements of a sum.

    Attributes:
        group: group of the ``mean``; None for the sum of the clients' changes.
        start: index of the first element.
        stop: index after the last element.
    """

    group: str | None
    start: int
    stop: int


@dataclass
class PartialSums:
    """Sums of the contributions of some clients.

    Attributes:
        totals: sums of a ``mean``, by group.
        updates: sum of the clients' changes and of their squared norms.
    """

    totals: dict[str, ExactSum] = field(default_factory=dict)
    updates: ExactSum = field(default_factory=ExactSum)

    @property
    def nbytes(self) -> int:
        """Approximate number of bytes when they are sent."""
        return sum(_nbytes(total) for total in (*self.totals.values(), self.updates))


def take_sums(result: JobResult, least: int) -> PartialSums | None:
    """Moves the sums out of a result and marks it ``apart``; None if they are smaller than ``least`` bytes."""
    sums = PartialSums(result.totals, result.updates)
    if sums.nbytes < least:
        return None
    result.totals, result.updates, result.apart = {}, ExactSum(), True
    return sums


def merge_sums(parts: Sequence[PartialSums], round: int, procedure: str) -> PartialSums:
    """Merges the sums of several hosts.

    Args:
        parts: sums of the hosts; may be modified.
        round: round, 0-indexed, for errors.
        procedure: name of the procedure, for errors.

    Raises:
        ClientError, MethodError: when the clients' contributions cannot be added.
    """
    whole = PartialSums()
    for part in parts:
        for group, total in part.totals.items():
            merge(whole.totals.setdefault(group, ExactSum()), total, round, procedure)
        merge(whole.updates, part.updates, round, procedure)
    return whole


def extract_part(sums: PartialSums, stretch: SumRange | None) -> JobResult:
    """Returns a part of sums, to be sent to another machine.

    Args:
        sums: sums that are merged already; not modified.
        stretch: range of elements; None for everything but the elements.
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
