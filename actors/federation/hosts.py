"""Assigns clients to hosts, moves their states there, and calls the hosts."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from actors.federation.assignment import assign
from actors.federation.merging import Merging
from actors.federation.pace import Pace
from actors.hosting.job import Job, JobResult
from actors.hosting.memory import Lookups
from actors.hosting.running_clients import describe_clients, log_printed
from actors.hosting.state import Change
from actors.processes.pool import HostDiedError, HostPool
from algorithms.on_demand import trees_of
from rayfl.errors import ClientError
from rayfl.params import Tree, from_numpy, to_numpy
from rayfl.storage.manifest import StoredFile

_log = logging.getLogger("rayfl")
_UNDER_WAY = 3
"""Pieces that a host is given at a time: while it runs one, the next are there. All at once would put the payloads of
all clients into Ray's object store; and hosts in this process would run all of them before the first is reported."""


class Hosts:
    """The hosts of a pool, and the clients' states on them.

    Args:
        pool: the hosts.
        pinned: host i runs client i and no other (one client per actor).
        deadline_s: seconds after which a host that has not answered counts as dead; None: never.
        measured: whether clients are assigned by measured times instead of estimated costs alone.

    Attributes:
        committed: the file of a client's state in the last commit.
        waited_s: seconds spent waiting for results since the last reset. lookups: memory hits and misses for clients'
            states and samples since the last reset.
    """

    def __init__(
        self,
        pool: HostPool,
        pinned: bool = False,
        deadline_s: float | None = None,
        measured: bool = False,
    ) -> None:
        self._pool = pool
        self._pinned = pinned
        self._deadline_s = deadline_s
        self._pace = Pace() if measured else None
        # by client, the host whose memory holds its state
        self._home: dict[int, int] = {}
        self.committed: dict[int, StoredFile] = {}
        self.waited_s = 0.0
        self.lookups = Lookups()

    def dispatch(
        self,
        job: Job,
        costs: Mapping[int, float],
        broadcast: Tree,
        payloads: Mapping[int, Tree],
        at_a_time: int | None = None,
        alone: Collection[int] = (),
    ) -> Iterator[JobResult]:
        """Assigns clients to hosts, moves their states there, and yields the results as they arrive.

        Args:
            job: what to do; its clients are ``costs``.
            costs: expected work by client, positive.
            broadcast: keyword arguments equal for all.
            payloads: further keyword arguments by client.
            at_a_time: splits a host's share into pieces of that many clients. Only for procedures that change no state:
                every piece carries all states that move to its host, since pieces may start in any order. A host is
                given a few pieces at a time.
            alone: clients that run before the others, one at a time, while all hosts are idle otherwise.

        Raises:
            ClientError: naming the client that failed.
            HostDiedError: naming the clients that may be to blame.
        """
        common = self._pool.put(to_numpy(broadcast))
        for client in sorted(set(alone) & costs.keys()):
            yield from self._dispatched(job, {client: costs[client]}, common, payloads, None)
        if others := {client: cost for client, cost in costs.items() if client not in alone}:
            yield from self._dispatched(job, others, common, payloads, at_a_time)

    def _dispatched(
        self,
        job: Job,
        costs: Mapping[int, float],
        common: Any,
        payloads: Mapping[int, Tree],
        at_a_time: int | None,
    ) -> Iterator[JobResult]:
        hosts = self._pool.size
        pinned = {client: client % hosts for client in costs} if self._pinned else None
        shares = _by_host(pinned, hosts) if pinned else self._assigned(job.procedure, costs)
        shares = [sorted(share) for share in shares]
        moves = self._move_states(shares)
        handles: dict[Any, int] = {}
        merging = Merging(self._pool, job, [host for host, clients in enumerate(shares) if clients])
        waiting = [_pieces(share, at_a_time) for share in shares]
        owing = [set[int]() for _ in shares]

        def submit(host: int, count: int) -> None:
            for piece in itertools.islice(waiting[host], count):
                own = trees_of(payloads, piece)  # lives on, since what is made goes by the ids of its tensors
                made: dict[int, np.ndarray] = {}  # an array given to several clients is sent once
                share = replace(
                    job,
                    clients=piece,
                    payloads={client: to_numpy(own[client], made) for client in own},
                    committed=self._not_in_memory(piece),
                )
                owing[host].update(piece)
                handles[merging.submit(host, share, common, *moves.get(host, []))] = host

        for host in range(hosts):
            submit(host, _UNDER_WAY)
        try:
            for host, result in self._collected(handles):
                assert not result.abandoned, "no call may read what was given up for a rewind"
                owing[host] -= result.seconds.keys()
                log_printed(result.printed)
                for client in result.stateful:
                    self._home[client] = host
                for client, times in sorted(result.retried.items()):
                    place = f"client {client}, round {job.round + 1}, {job.procedure}"
                    _log.warning("%s: failed %d times, then succeeded", place, times)
                self.lookups += result.lookups
                if self._pace is not None:
                    self._pace.observe(job.procedure, host, costs, result.seconds)
                handles |= self._answered(merging, host, result)
                submit(host, 1)
                yield result
            if (sums := merging.result()) is not None:
                yield sums
        except ClientError as error:
            log_printed(error.printed)
            raise
        except HostDiedError as death:
            log_printed(death.printed)
            raise _naming(death, job, sorted(owing[death.host])) from None

    def _assigned(self, procedure: str, costs: Mapping[int, float]) -> list[list[int]]:
        if self._pace is None:
            return assign(costs, [1.0] * self._pool.size, self._home)
        return assign(self._pace.work(procedure, costs), self._pace.slowness(self._pool.size), self._home)

    def _collected(self, handles: dict[Any, int]) -> Iterator[tuple[int, JobResult]]:
        """Yields the hosts' results, and adds up the time spent waiting for them."""
        results = self._pool.collect(handles, self._deadline_s, of_clients=True)
        while True:
            started = time.perf_counter()
            found = next(results, None)
            self.waited_s += time.perf_counter() - started
            if found is None:
                return
            yield found

    def _answered(self, merging: Merging, host: int, result: JobResult) -> dict[Any, int]:
        """Returns handles of further results of sums that are sent in parts; adds up the time spent waiting."""
        started = time.perf_counter()
        further = merging.answered(host, result)
        self.waited_s += time.perf_counter() - started
        return further

    def _move_states(self, shares: Sequence[Sequence[int]]) -> dict[int, list[Any]]:
        """Starts moving states between hosts; returns, by receiving host, the handles to wait for."""
        moves: dict[tuple[int, int], list[int]] = {}
        for target, clients in enumerate(shares):
            for client in clients:
                source = self._home.get(client, target)
                if source != target:
                    moves.setdefault((source, target), []).append(client)
        handles: dict[int, list[Any]] = {}
        for (source, target), clients in moves.items():
            handles.setdefault(target, []).append(self._pool.submit(source, "release", clients))
        return handles

    def _not_in_memory(self, clients: Sequence[int]) -> dict[int, StoredFile]:
        return {
            client: self.committed[client]
            for client in clients
            if client in self.committed and client not in self._home
        }

    def start_commit(self, rounds_completed: int) -> dict[Any, int]:
        """Makes every host write its changed states; the next round may already run meanwhile."""
        return {self._pool.submit(host, "commit", rounds_completed): host for host in range(self._pool.size)}

    def finish_commit(self, handles: dict[Any, int], counts: dict[str, int] | None = None) -> dict[int, StoredFile]:
        """Waits for a commit started earlier; returns the files of the states it wrote, by client.

        May run on another thread, since it changes nothing here.

        Args:
            handles: of the commit.
            counts: receives how many states each of the files has, by its name; older ones that another host has
                replaced are among them.
        """
        newest: dict[int, tuple[Change, StoredFile]] = {}
        # With a deadline: no later call may notice that an actor hangs, at the end of the run.
        for _, files in self._pool.collect(handles, self._deadline_s):
            for file, changes in files:
                if counts is not None:
                    counts[file.name] = len(changes)
                for client, change in changes.items():
                    if client not in newest or newest[client][0] < change:
                        newest[client] = (change, file)
        return {client: file for client, (_, file) in sorted(newest.items())}

    def rewind(self) -> list[int]:
        """Rolls back to the last adopted commit: replaces dead hosts, clears live ones; returns the replaced hosts."""
        self._home.clear()
        replaced = self._pool.revive()
        if self._pace is not None:
            self._pace.forget_hosts()
        living = [host for host in range(self._pool.size) if host not in replaced]
        forgetting = {self._pool.submit(host, "rewind"): host for host in living}
        for _ in self._pool.collect(forgetting, self._deadline_s):
            pass
        return replaced

    def grow(self) -> None:
        """Takes new hosts into use; the next call assigns clients to them too."""
        self._pool.grow()

    def close(self) -> None:
        """Stops the hosts."""
        self._pool.close()

    def held_states(self) -> dict[int, Tree]:
        """Returns all client states in the hosts' memory, by client."""
        handles = {self._pool.submit(host, "held_states"): host for host in range(self._pool.size)}
        states = {client: state for _, held in self._pool.collect(handles) for client, state in held.items()}
        return {client: from_numpy(state) for client, state in sorted(states.items())}


def _naming(death: HostDiedError, job: Job, owed: Sequence[int]) -> HostDiedError:
    """Returns an error that names the suspects: the clients at work if the host said so, else all it owed."""
    clients = death.clients or tuple(owed)
    if job.kind in ("official", "server", "value"):
        clients, lost = (), f"{job.procedure} of {'the official test part' if job.kind == 'official' else 'the server'}"
    elif clients:
        lost = f"{job.procedure} of {describe_clients(clients)}"
    else:
        lost = f"the sums of {job.procedure}"
    reason = f"{death.reason} (it had {lost} in round {job.round + 1})"
    return HostDiedError(death.host, reason, clients, death.hung, death.certain, death.suspicious)


def _pieces(clients: Sequence[int], at_a_time: int | None) -> Iterator[tuple[int, ...]]:
    """Yields the clients in pieces of at most ``at_a_time``; None: all in one."""
    step = at_a_time or max(len(clients), 1)
    return (tuple(clients[start : start + step]) for start in range(0, len(clients), step))


def _by_host(hosts_of: Mapping[int, int], hosts: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(hosts)]
    for client, host in hosts_of.items():
        shares[host].append(client)
    return shares
