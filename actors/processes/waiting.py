"""Waits for the answers of hosts, and ends a host that does not answer in time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import ray

from actors.hosting.running_clients import describe_clients
from actors.processes.client_actor import host_name
from actors.processes.pool import HostDiedError
from actors.processes.ray_host import RayHost
from rayfl.engine.updates.requests import SERVER

OWN_WORK_S = 600.0
"""Seconds that a host may be at one piece of its own work, such as a commit, unless the deadline for clients is longer.
Repeating such work does not make it faster, but a storage that hangs must not hold up the run for ever."""

REMIND_S = 300.0
"""Seconds of silence after which the log says which host is waited for; twice as long after each time."""

_log = logging.getLogger("rayfl")


def collected(
    hosts: Sequence[RayHost], handles: MutableMapping[Any, int], deadline_s: float | None, of_clients: bool
) -> Iterator[tuple[int, Any]]:
    """Yields the results of hosts as they arrive; see ``actors.processes.pool.HostPool.collect``.

    Args:
        hosts: hosts by position.
        handles: position of the asked host, by handle. Handles may be added while results arrive; those of arrived
            results are removed.
        deadline_s: maximum seconds at the same clients, or without an answer; None for no limit. A host's own work has
            a limit of its own, see :data:`OWN_WORK_S`.
        of_clients: whether the hosts run clients' procedures.
    """
    # By host: since when it is silent, and from when on its deadline counts.
    silent_since, heard, known = dict[int, float](), dict[int, float](), set[Any]()
    remind_s = REMIND_S
    while waiting := list(handles):
        asked = {handles[handle]: time.monotonic() for handle in waiting if handle not in known}
        silent_since |= asked
        heard |= asked
        known = set(waiting)
        silent = min({handles[handle] for handle in waiting}, key=heard.__getitem__)
        left_s = remind_s if deadline_s is None else max(heard[silent] + deadline_s - time.monotonic(), 0.0)
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=min(left_s, remind_s))
        if not ready:
            if deadline_s is None or left_s > remind_s:
                waits_for = len({handles[handle] for handle in waiting})
                _remind(hosts[silent], waits_for, time.monotonic() - silent_since[silent])
                remind_s *= 2
            elif _has_answered(handle for handle in waiting if handles[handle] == silent):
                heard[silent] = time.monotonic()  # the answer is there, and is being transferred
            else:
                silent_s = time.monotonic() - silent_since[silent]
                at_it_s = silence(hosts[silent], silent, deadline_s, of_clients, silent_s)
                heard[silent] = time.monotonic() - at_it_s
            continue
        host = handles[ready[0]]
        silent_since[host] = heard[host] = time.monotonic()
        result = hosts[host].result(ready[0], host)
        known.remove(ready[0])
        del handles[ready[0]], ready  # the last references: Ray may free what it holds
        yield host, result
        del result


def _remind(host: RayHost, waits_for: int, silent_s: float) -> None:
    """Says in the log which host has been silent for longest, and what it is at."""
    doing = host.doing()
    if doing is None:
        at = "it does not say what it is doing"
    else:
        work = [f"{what} for {seconds:.0f} s" for what, seconds in doing.work.items()]
        ran = [f"{describe_clients(doing.clients)} for {doing.seconds:.0f} s"] if doing.clients else []
        at = f"it is at {', '.join([*ran, *work]) or 'nothing'}"
    where = f"{host_name(host.number)} on {host.description.get('node', 'an unknown node')}"
    others = f", nor from {waits_for - 1} others" if waits_for > 1 else ""
    _log.warning("no answer from %s for %.0f s%s: %s (clients.deadline_s ends waiting)", where, silent_s, others, at)


def _has_answered(handles: Iterable[Any]) -> bool:
    """Returns whether one of some answers is ready, on any node."""
    return bool(ray.wait(list(handles), num_returns=1, timeout=1, fetch_local=False)[0])


def silence(host: RayHost, position: int, deadline_s: float, of_clients: bool, silent_s: float) -> float:
    """Returns for how many seconds a host without an answer has been at the same clients; 0 at work of its own.

    Args:
        host: the host.
        position: its position, for errors.
        deadline_s: maximum seconds at the same clients.
        of_clients: whether it was asked to run clients' procedures. If not, clients are not to blame.
        silent_s: seconds since it was asked, or since its last answer.

    Raises:
        HostDiedError: when that is too long, or the host does not report; it is ended then.
    """
    doing, reason = host.doing(), f"no answer within clients.deadline_s={deadline_s:g} s"
    if doing is not None:
        if doing.clients == (SERVER,):
            return 0.0  # the limit is for clients
        if doing.clients and doing.seconds < deadline_s:
            return doing.seconds
        if doing.work and not (of_clients and doing.clients):
            work, limit_s = max(doing.work, key=doing.work.__getitem__), max(deadline_s, OWN_WORK_S)
            # A host that waits has waited since its last call, perhaps long before it was asked.
            if min(doing.work[work], silent_s) < limit_s:
                return 0.0
            reason = f"no end of {work} within {limit_s:g} s"
    # Pings are answered by another thread: only killing the process makes sure that it does not continue.
    ray.kill(host.actor)
    clients = doing.clients if doing is not None and of_clients else ()
    suspicious = of_clients and (doing is None or bool(clients))
    printed = doing.printed if doing is not None else ()
    raise HostDiedError(position, reason, clients, True, certain=bool(clients), suspicious=suspicious, printed=printed)
