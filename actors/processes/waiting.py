"""Waits for the answers of hosts, and ends a host that does not answer in time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import ray

from actors.processes.pool import HostDiedError
from actors.processes.ray_host import RayHost
from rayfl.engine.requests import SERVER


def collected(
    hosts: Sequence[RayHost], handles: MutableMapping[Any, int], deadline_s: float | None, of_clients: bool
) -> Iterator[tuple[int, Any]]:
    """Yields the results of hosts as they arrive; see ``actors.processes.pool.HostPool.collect``.

    Args:
        hosts: hosts by position.
        handles: position of the asked host, by handle. Handles may be added while results arrive; those of arrived
            results are removed.
        deadline_s: maximum seconds at the same clients, or without an answer; None for no limit.
        of_clients: whether the hosts run clients' procedures.
    """
    heard, known = dict[int, float](), set[Any]()
    while waiting := list(handles):
        heard |= {handles[handle]: time.monotonic() for handle in waiting if handle not in known}
        known, timeout = set(waiting), None
        if deadline_s is not None:
            silent = min({handles[handle] for handle in waiting}, key=heard.__getitem__)
            timeout = max(heard[silent] + deadline_s - time.monotonic(), 0.0)
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=timeout)
        if not ready:
            assert deadline_s is not None
            if _has_answered(handle for handle in waiting if handles[handle] == silent):
                heard[silent] = time.monotonic()  # the answer is there, and is being transferred
            else:
                heard[silent] = time.monotonic() - silence(hosts[silent], silent, deadline_s, of_clients)
            continue
        host = handles[ready[0]]
        heard[host] = time.monotonic()
        result = hosts[host].result(ready[0], host)
        known.remove(ready[0])
        del handles[ready[0]], ready  # the last references: Ray may free what it holds
        yield host, result
        del result


def _has_answered(handles: Iterable[Any]) -> bool:
    """Returns whether one of some answers is ready, on any node."""
    return bool(ray.wait(list(handles), num_returns=1, timeout=1, fetch_local=False)[0])


def silence(host: RayHost, position: int, deadline_s: float, of_clients: bool) -> float:
    """Returns for how many seconds a host without an answer has been at the same clients.

    Raises:
        HostDiedError: when that is too long, or the host does not report; it is ended then.
    """
    doing = host.doing() if of_clients else None
    if doing is not None and doing.clients == (SERVER,):
        return 0.0  # the limit is for clients
    if doing is not None and doing.clients and doing.seconds < deadline_s:
        return doing.seconds
    # Pings are answered by another thread: only killing the process makes sure that it does not continue.
    ray.kill(host.actor)
    reason = f"no answer within clients.deadline_s={deadline_s:g} s"
    if doing is None:
        raise HostDiedError(position, reason, hung=True, suspicious=of_clients)
    named = bool(doing.clients)
    raise HostDiedError(position, reason, doing.clients, True, certain=named, suspicious=named, printed=doing.printed)
