"""Has the hosts of one machine merge their sums, so that the driver receives one sum a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from actors.hosting.job import Job, JobResult
from actors.processes.pool import HostPool


class Merging:
    """The sums of one call.

    Two sums that are ready on a machine are merged by the host of one of them, which has answered and is idle, while
    others still train. The sums stay on their machine until only one is left. Small ones come with the results of their
    hosts, and so do those of a host that is alone on its machine.

    Args:
        pool: the hosts.
        job: what they do.
        taking_part: the hosts that have a share of it.
    """

    def __init__(self, pool: HostPool, job: Job, taking_part: Collection[int]) -> None:
        self._pool = pool
        self._job = job
        found = {host: pool.machine(host) for host in taking_part} if job.kind == "mean" else {}
        sharing = Counter(found.values())
        self._machine = {host: name for host, name in found.items() if name is not None and sharing[name] > 1}
        self._owed = Counter(self._machine.values())
        self._ready: dict[str, list[int]] = {name: [] for name in self._owed}
        self._sums: dict[int, Any] = {}

    def submit(self, host: int, *args: Any) -> Any:
        """Starts a host's share; returns a handle of its result."""
        if host not in self._machine:
            return self._pool.submit(host, "run", *args)
        handle, self._sums[host] = self._pool.submit_apart(host, "run_apart", *args)
        return handle

    def answered(self, host: int, result: JobResult) -> Any:
        """Takes note of a result; returns a handle of the next one that the host owes, where it merges two sums."""
        machine = self._machine.get(host)
        if machine is None:
            return None
        self._owed[machine] -= 1
        ready = self._ready[machine]
        if result.apart:
            ready.append(host)
        if len(ready) < 2:
            return None
        own, other = ready.pop(), ready.pop()
        assert own == host
        self._owed[machine] += 1
        args = self._job.round, self._job.procedure, self._sums.pop(own), self._sums.pop(other)
        handle, self._sums[own] = self._pool.submit_apart(own, "merged", *args)
        return handle

    def brought_home(self, host: int) -> JobResult | None:
        """The sums of the host's machine once all are one; None before, and where there are none."""
        machine = self._machine.get(host)
        if machine is None or self._owed[machine] or not self._ready[machine]:
            return None
        holder = self._ready[machine].pop()
        sums = self._pool.fetch(holder, self._sums.pop(holder))
        return JobResult(totals=sums.totals, updates=sums.updates)
