"""Merges the sums of hosts on one machine, so that the driver receives one sum per machine."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from typing import Any

from actors.hosting.job import Job, JobResult
from actors.hosting.sums import PartialSums, SumRange
from actors.processes.pool import HostPool
from algorithms.clients import no_sum
from rayfl.aggregation.exact_sum import ExactSum
from rayfl.aggregation.pieces import Gathered, stretches_of

PIECE_BYTES = 8 << 20
"""About as many bytes of a sum travel to another machine at a time."""
_UNDER_WAY = 3
"""As many pieces are asked for at a time: while one is added, others are on their way."""


class Merging:
    """Merges the sums of one call.

    Two sums on a machine are merged by one of their hosts, which is idle while others still train. The sums stay on
    their machine until only one is left. A remote machine's sum is sent in parts, one machine after another; on the
    driver's own machine it is read in place. Small sums, and those of a single host on the driver's machine, come with
    the hosts' results.

    Args:
        pool: the hosts.
        job: the job they run.
        taking_part: the hosts with a share of it.
    """

    def __init__(self, pool: HostPool, job: Job, taking_part: Collection[int]) -> None:
        self._pool = pool
        self._job = job
        self._home = pool.home
        found = {host: pool.machine(host) for host in taking_part} if job.kind == "mean" else {}
        sharing = Counter(found.values())
        self._machine = {
            host: name for host, name in found.items() if name is not None and (sharing[name] > 1 or name != self._home)
        }
        self._owed = Counter(self._machine.values())
        self._ready: dict[str, list[int]] = {name: [] for name in self._owed}
        self._sums: dict[int, Any] = {}
        self._gathered: dict[str | None, Gathered] = {}
        # Remote hosts that hold their machine's sum; the first one is sending it.
        self._senders: deque[int] = deque()
        self._to_ask: deque[SumRange] = deque()
        self._asked = 0

    def submit(self, host: int, *args: Any) -> Any:
        """Starts a host's share; returns a handle for its result."""
        if host not in self._machine:
            return self._pool.submit(host, "run", *args)
        handle, self._sums[host] = self._pool.submit_apart(host, "run_apart", *args)
        return handle

    def answered(self, host: int, result: JobResult) -> dict[Any, int]:
        """Records a result, and takes out its part of sums that are sent separately.

        Returns:
            Handles of further results, with the hosts that will give them.

        Raises:
            ClientError, MethodError: when the clients' contributions cannot be added.
        """
        machine = self._machine.get(host)
        if machine is None:
            return {}
        if self._senders and self._senders[0] == host:
            return self._arrived(result)
        self._owed[machine] -= 1
        ready = self._ready[machine]
        if result.apart:
            ready.append(host)
        if len(ready) == 2:
            own, other = ready.pop(), ready.pop()
            assert own == host
            self._owed[machine] += 1
            args = self._job.round, self._job.procedure, self._sums.pop(own), self._sums.pop(other)
            handle, self._sums[own] = self._pool.submit_apart(own, "merged", *args)
            return {handle: own}
        if self._owed[machine] or not ready:
            return {}
        holder = ready.pop()
        if machine == self._home:
            sums: PartialSums = self._pool.fetch(holder, self._sums.pop(holder))
            self._begin(sums.totals, sums.updates)
            return {}
        self._senders.append(holder)
        return self._ask(None) if len(self._senders) == 1 else {}

    def result(self) -> JobResult | None:
        """Returns the sum over all machines, once all results are recorded; None if no sum was sent separately."""
        found = {group: gathered.total for group, gathered in self._gathered.items()}
        if not found:
            return None
        updates = found.pop(None)
        return JobResult(totals={group: total for group, total in found.items() if group is not None}, updates=updates)

    def _arrived(self, result: JobResult) -> dict[Any, int]:
        """Adds a part of the first sender's sum; requests the next."""
        self._asked -= 1
        if result.piece is None:
            self._begin(result.totals, result.updates)
            for group, head in [*result.totals.items(), (None, result.updates)]:
                self._to_ask += [SumRange(group, *ends) for ends in stretches_of(head, PIECE_BYTES)]
            result.totals, result.updates = {}, ExactSum()
        else:
            group, piece = result.piece
            self._gathered[group].add(piece)
            result.piece = None
        further: dict[Any, int] = {}
        while self._to_ask and self._asked < _UNDER_WAY:
            further |= self._ask(self._to_ask.popleft())
        if self._asked:
            return further
        del self._sums[self._senders.popleft()]
        return self._ask(None) if self._senders else {}

    def _ask(self, stretch: SumRange | None) -> dict[Any, int]:
        """Requests a part of the first sender's sum."""
        sender = self._senders[0]
        self._asked += 1
        return {self._pool.submit(sender, "part", self._sums[sender], stretch): sender}

    def _begin(self, totals: dict[str, ExactSum], updates: ExactSum) -> None:
        """Starts to add a machine's sums, without what follows in parts."""
        for group, head in [*totals.items(), (None, updates)]:
            try:
                self._gathered.setdefault(group, Gathered()).begin(head)
            except (OverflowError, ValueError) as error:
                raise no_sum(error, self._job.round, self._job.procedure) from error
