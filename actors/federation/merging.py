"""Has the hosts of one machine merge their sums, so that the driver receives one sum a machine."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from typing import Any

from actors.hosting.job import Job, JobResult
from actors.hosting.sums import PartialSums, Stretch
from actors.processes.pool import HostPool
from rayfl.aggregation.exact_sum import ExactSum
from rayfl.aggregation.pieces import Gathered, stretches_of
from rayfl.errors import ClientError

PIECE_BYTES = 8 << 20
"""About as many bytes of a sum travel to another machine at a time."""
_UNDER_WAY = 3
"""As many pieces are asked for at a time: while one is added, others are on their way."""


class Merging:
    """The sums of one call.

    Two sums that are ready on a machine are merged by the host of one of them, which has answered and is idle, while
    others still train. The sums stay on their machine until only one is left. From other machines than the driver's it
    arrives in pieces, one machine's after another's; on the driver's it is read where it lies. Small sums come with the
    results of their hosts, and so do those of a host that is alone on the driver's machine.

    Args:
        pool: the hosts.
        job: what they do.
        taking_part: the hosts that have a share of it.
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
        # Hosts of other machines that hold the sum of theirs; the first one's is on its way.
        self._senders: deque[int] = deque()
        self._to_ask: deque[Stretch] = deque()
        self._asked = 0

    def submit(self, host: int, *args: Any) -> Any:
        """Starts a host's share; returns a handle of its result."""
        if host not in self._machine:
            return self._pool.submit(host, "run", *args)
        handle, self._sums[host] = self._pool.submit_apart(host, "run_apart", *args)
        return handle

    def answered(self, host: int, result: JobResult) -> dict[Any, int]:
        """Takes note of a result; what it has of sums that travel apart is taken out.

        Returns:
            The handles of further results, and the hosts that owe them.

        Raises:
            ClientError: when the clients' contributions make no sum together.
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
        """The sums of all machines, once all results were taken note of; None if none travelled apart."""
        found = {group: gathered.total for group, gathered in self._gathered.items()}
        if not found:
            return None
        updates = found.pop(None)
        return JobResult(totals={group: total for group, total in found.items() if group is not None}, updates=updates)

    def _arrived(self, result: JobResult) -> dict[Any, int]:
        """Adds a part of the first sender's sum; asks for what follows."""
        self._asked -= 1
        if result.piece is None:
            self._begin(result.totals, result.updates)
            for group, head in [*result.totals.items(), (None, result.updates)]:
                self._to_ask += [Stretch(group, *ends) for ends in stretches_of(head, PIECE_BYTES)]
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

    def _ask(self, stretch: Stretch | None) -> dict[Any, int]:
        """Asks the first sender for a part of its sum."""
        sender = self._senders[0]
        self._asked += 1
        return {self._pool.submit(sender, "part", self._sums[sender], stretch): sender}

    def _begin(self, totals: dict[str, ExactSum], updates: ExactSum) -> None:
        """Begins to add the sums of a machine, which may lack what comes in pieces."""
        for group, head in [*totals.items(), (None, updates)]:
            try:
                self._gathered.setdefault(group, Gathered()).begin(head)
            except (OverflowError, ValueError) as error:
                place = f"the clients, round {self._job.round}, {self._job.procedure}"
                raise ClientError(f"{place}: {error}") from error
