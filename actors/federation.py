"""The driver's handle on all clients: assign, call, collect, evaluate, commit, rewind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from actors.assignment import assign
from actors.host import Job, JobResult, Scores
from actors.pool import HostPool
from actors.state import Change
from algorithms.base import Procedure
from rayfl.aggregation import ExactSum, Weighted
from rayfl.commits import StoredFile
from rayfl.engine.client import RoundContext
from rayfl.params import Tree, from_numpy, num_bytes, to_numpy

_EVALUATED_AT_A_TIME = 64
"""Clients per call of an evaluation: enough to make the call cheap, few enough to show progress."""


@dataclass
class Traffic:
    """Bytes between server and clients in a round, as a deployment would send them (before any reduction).

    Attributes:
        by_client: bytes down and up of each client that took part.
    """

    by_client: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def down(self) -> int:
        """Bytes to clients."""
        return sum(down for down, _ in self.by_client.values())

    @property
    def up(self) -> int:
        """Bytes from clients."""
        return sum(up for _, up in self.by_client.values())

    def add(self, client: int, down: int = 0, up: int = 0) -> None:
        """Counts a message."""
        before = self.by_client.get(client, (0, 0))
        self.by_client[client] = (before[0] + down, before[1] + up)


@dataclass
class _Placement:
    """Where client states are.

    Attributes:
        home: the host whose memory holds a client's state.
        committed: the file of a client's state in the last commit.
    """

    home: dict[int, int] = field(default_factory=dict)
    committed: dict[int, StoredFile] = field(default_factory=dict)


class Federation:
    """All clients of an experiment, spread over the hosts of a pool.

    Args:
        pool: the hosts.
        context: round context of the experiment.
        sizes: samples by client and split (K, 3): train, validation, test.
        pinned: host i runs client i and no other (one client per actor).
    """

    def __init__(self, pool: HostPool, context: RoundContext, sizes: np.ndarray, pinned: bool = False) -> None:
        self._pool = pool
        self._context = context
        self._sizes = sizes
        self._pinned = pinned
        self._placement = _Placement()
        self._trained_splits: tuple[str, ...] = ()
        self.trained_scores: Scores = {}
        self.traffic = Traffic()
        self._updates = ExactSum()
        self.waited_s = 0.0

    @property
    def context(self) -> RoundContext:
        """Round, rounds, number of clients, random streams."""
        return self._context

    @property
    def pooled(self) -> int:
        """The id of the client that owns everybody's samples; see ``algorithms.base.Clients``."""
        return self._context.num_clients

    def begin_round(self, round: int, trained_splits: Sequence[str] = ()) -> None:
        """Sets the round; models published in it are scored on ``trained_splits`` (none: not at all)."""
        self._context = replace(self._context, round=round, final=False)
        self._trained_splits = tuple(trained_splits)
        self.trained_scores = {}
        self.traffic = Traffic()
        self._updates = ExactSum()
        self.waited_s = 0.0

    def update_variance(self) -> float | None:
        """Total variance of the round's updates, sum of ||D_k - mean D||^2; None if the method reports none."""
        if self._updates.weight == 0:
            return None
        mean = self._updates.mean()
        spread = float(mean["squared_norm"]) - float(mean["change"] @ mean["change"])
        return self._updates.weight * max(spread, 0.0)

    def num_samples(self, clients: Sequence[int]) -> np.ndarray:
        """Training samples n_k of the given clients, int64."""
        own = self._sizes[:, 0]
        return np.append(own, own.sum())[np.asarray(clients, dtype=np.int64)]

    def mean(
        self,
        procedure: Procedure,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None = None,
        also: Weighted | None = None,
    ) -> Tree:
        """The exact weighted mean of what the cohort's procedures return; see ``algorithms.base.Clients``."""
        total = ExactSum()
        if also is not None:
            total.add(also)
        for result in self._call(procedure.__name__, "mean", cohort, broadcast, payloads or {}):
            for part in result.totals.values():
                total.merge(part)
        return total.mean()

    def means(
        self,
        procedure: Procedure,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None = None,
    ) -> dict[str, Tree]:
        """One exact weighted mean a group, by group, ascending; see ``algorithms.base.Clients``."""
        totals: dict[str, ExactSum] = {}
        for result in self._call(procedure.__name__, "mean", cohort, broadcast, payloads or {}):
            for group, part in result.totals.items():
                totals.setdefault(group, ExactSum()).merge(part)
        return {group: totals[group].mean() for group in sorted(totals)}

    def map(
        self,
        procedure: Procedure,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree] | None = None,
        counted: bool = True,
    ) -> dict[int, Any]:
        """What the cohort's procedures return, by client, ascending; see ``algorithms.base.Clients``."""
        values: dict[int, Any] = {}
        for result in self._call(procedure.__name__, "map", cohort, broadcast, payloads or {}, counted):
            values.update({client: from_numpy(value) for client, value in result.values.items()})
        return dict(sorted(values.items()))

    def evaluate(
        self,
        server: Tree,
        splits: Sequence[str],
        final: bool,
        payloads: Mapping[int, Tree] | None = None,
        clients: Sequence[int] | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> Scores:
        """Scores the predictors of clients, spread over all hosts.

        Args:
            server: what all clients see of the server.
            splits: the splits to score on.
            final: whether this is the evaluation after the last round.
            payloads: what single clients see besides.
            clients: whose; None for all.
            report: called with the number of clients scored so far and of all, as results arrive.
        """
        everyone = range(self._context.num_clients) if clients is None else clients
        job = Job("predictors", "evaluate", self._context.round, (), splits=tuple(splits), final=final)
        costs = {client: float(self._sizes[client, 1:].sum() + 1) for client in everyone}
        scores: Scores = {}
        for result in self._dispatch(job, costs, server, payloads or {}, at_a_time=_EVALUATED_AT_A_TIME):
            scores.update(result.scores)
            if report is not None:
                report(len(scores), len(costs))
        return dict(sorted(scores.items()))

    def _call(
        self,
        name: str,
        kind: str,
        cohort: Sequence[int],
        broadcast: Tree,
        payloads: Mapping[int, Tree],
        counted: bool = True,
    ) -> Iterator[JobResult]:
        """Runs a procedure on the cohort; yields the hosts' results as they arrive."""
        costs = {client: float(n + 1) for client, n in zip(cohort, self.num_samples(cohort), strict=True)}
        job = Job(name, kind, self._context.round, (), splits=self._trained_splits, counted=counted)
        if counted:
            common = num_bytes(broadcast)
            for client in cohort:
                self.traffic.add(client, down=common + num_bytes(payloads.get(client, {})))
        for result in self._dispatch(job, costs, broadcast, payloads):
            self.trained_scores.update(result.scores)
            for client, size in result.upload_bytes.items():
                self.traffic.add(client, up=size)
            self._updates.merge(result.updates)
            yield result

    def _dispatch(
        self,
        job: Job,
        costs: Mapping[int, float],
        broadcast: Tree,
        payloads: Mapping[int, Tree],
        at_a_time: int | None = None,
    ) -> Iterator[JobResult]:
        """Assigns clients to hosts, moves their states there, and yields the results as they arrive.

        With ``at_a_time`` a host does its share in pieces of so many clients (for procedures that change no state:
        every piece brings all states that move to its host, since a host need not begin them in order).
        """
        hosts = self._pool.size
        pinned = {client: client % hosts for client in costs} if self._pinned else None
        shares = _by_host(pinned, hosts) if pinned else assign(costs, hosts, self._placement.home)
        common = self._pool.put(to_numpy(broadcast))
        moves = self._move_states(shares)
        handles: dict[Any, int] = {}
        for host, clients in enumerate(shares):
            if not clients:
                continue
            mine = tuple(sorted(clients))
            step = at_a_time or len(mine)
            for piece in (mine[start : start + step] for start in range(0, len(mine), step)):
                share = replace(
                    job,
                    clients=piece,
                    payloads={client: to_numpy(payloads[client]) for client in piece if client in payloads},
                    committed=self._not_in_memory(piece),
                )
                handles[self._pool.submit(host, "run", share, common, *moves.get(host, []))] = host
        for host, result in self._collected(handles):
            for client in result.stateful:
                self._placement.home[client] = host
            yield result

    def _collected(self, handles: Mapping[Any, int]) -> Iterator[tuple[int, JobResult]]:
        """The hosts' results; the time spent waiting for them is noted."""
        results = self._pool.collect(handles)
        while True:
            started = time.perf_counter()
            found = next(results, None)
            self.waited_s += time.perf_counter() - started
            if found is None:
                return
            yield found

    def _move_states(self, shares: Sequence[Sequence[int]]) -> dict[int, list[Any]]:
        """Starts the moves of states between hosts; returns the handles each receiving host waits for."""
        moves: dict[tuple[int, int], list[int]] = {}
        for target, clients in enumerate(shares):
            for client in clients:
                source = self._placement.home.get(client, target)
                if source != target:
                    moves.setdefault((source, target), []).append(client)
        handles: dict[int, list[Any]] = {}
        for (source, target), clients in moves.items():
            handles.setdefault(target, []).append(self._pool.submit(source, "release", clients))
        return handles

    def _not_in_memory(self, clients: Sequence[int]) -> dict[int, StoredFile]:
        place = self._placement
        return {
            client: place.committed[client]
            for client in clients
            if client in place.committed and client not in place.home
        }

    def start_commit(self, rounds_completed: int) -> dict[Any, int]:
        """Has every host write its changed states, while the next round may already run."""
        return {self._pool.submit(host, "commit", rounds_completed): host for host in range(self._pool.size)}

    def finish_commit(self, handles: Mapping[Any, int]) -> dict[int, StoredFile]:
        """Waits for a commit started earlier; returns the files of the states it wrote, by client.

        May run on another thread than the rest: it changes nothing here.
        """
        newest: dict[int, tuple[Change, StoredFile]] = {}
        for _, written in self._pool.collect(handles):
            if written is None:
                continue
            file, changes = written
            for client, change in changes.items():
                if client not in newest or newest[client][0] < change:
                    newest[client] = (change, file)
        return {client: file for client, (_, file) in sorted(newest.items())}

    def adopt(self, committed: Mapping[int, StoredFile]) -> None:
        """Takes note of where a commit has the states."""
        self._placement.committed = dict(committed)

    def rewind(self) -> list[int]:
        """Back to the adopted commit: dead hosts are replaced, live ones forget; returns the replaced hosts."""
        self._placement.home.clear()
        replaced = self._pool.revive()
        living = [host for host in range(self._pool.size) if host not in replaced]
        for _ in self._pool.collect({self._pool.submit(host, "rewind"): host for host in living}):
            pass
        return replaced

    def held_states(self) -> dict[int, Tree]:
        """All client states in the hosts' memories, by client."""
        handles = {self._pool.submit(host, "held_states"): host for host in range(self._pool.size)}
        states = {client: state for _, held in self._pool.collect(handles) for client, state in held.items()}
        return {client: from_numpy(state) for client, state in sorted(states.items())}

    def close(self) -> None:
        """Ends the hosts."""
        self._pool.close()


def _by_host(hosts_of: Mapping[int, int], hosts: int) -> list[list[int]]:
    shares: list[list[int]] = [[] for _ in range(hosts)]
    for client, host in hosts_of.items():
        shares[host].append(client)
    return shares
