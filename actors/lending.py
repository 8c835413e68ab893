"""Who gets the cores of hosts that have nothing left to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

_NEARLY = 0.1
"""A host counts as finished that is so by the time that a client has done this share of its work."""


def lent_threads(
    shares: Sequence[Sequence[int]], costs: Mapping[int, float], cores: Sequence[tuple[str, float]], own: int
) -> dict[int, int]:
    """Plans with how many threads the clients are trained that begin when other hosts have finished.

    The hosts of a machine that are busy when a client begins share all cores of the machine's hosts equally. Time is
    what the costs say, not a clock, so that the same assignment always has the same threads.

    Args:
        shares: client ids by host, in the order in which the host trains them.
        costs: expected work by client, positive.
        cores: machine and reserved CPUs of each host.
        own: threads that a host has in any case.

    Returns:
        Threads by client, of those that get more than ``own``.
    """
    neighbours = defaultdict(list)
    for host, (machine, _) in enumerate(cores):
        neighbours[machine].append(host)
    ends = [sum(costs[client] for client in share) for share in shares]
    threads = {}
    for hosts in neighbours.values():
        all_cores = sum(cores[host][1] for host in hosts)
        for host in hosts:
            begins = 0.0
            for client in shares[host]:
                busy = sum(ends[other] > begins + _NEARLY * costs[client] for other in hosts)
                each = int(all_cores / busy)
                if busy < len(hosts) and each > own:
                    threads[client] = each
                begins += costs[client]
    return threads


@contextmanager
def training_with(threads: int | None) -> Iterator[None]:
    """PyTorch has so many threads in the body; None: as many as before."""
    if threads is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
