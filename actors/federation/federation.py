"""The driver's handle on all clients: assign, call, collect, evaluate, commit, rewind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from actors.federation.costs import Costs
from actors.federation.evaluation import Evaluation
from actors.federation.host_deaths import HostDeaths
from actors.federation.hosts import Hosts
from actors.federation.participation import Participation
from actors.federation.secure_sum import check_sum
from actors.federation.traffic import Traffic
from actors.federation.updates import Updates
from actors.hosting.contract import run_round
from actors.hosting.failures import ClientsFailedError, Failure
from actors.hosting.job import Job, JobResult
from actors.hosting.memory import Lookups
from actors.hosting.packed_scores import Scores
from algorithms.base import Algorithm
from algorithms.clients import Call, Clients, Procedure, Replies, merge, name_of
from rayfl.aggregation.exact_sum import ExactSum
from rayfl.config.cluster_section import ClientsConfig
from rayfl.engine.round_context import RoundContext
from rayfl.engine.updates.requests import SERVER
from rayfl.engine.updates.write_guard import WriteGuard
from rayfl.errors import MethodError
from rayfl.metrics import Statistics
from rayfl.params import Tree, from_numpy, num_bytes, own_dicts
from rayfl.storage.manifest import StoredFile
from rayfl.tasks.base import Task


class Federation(Clients):
    """All clients of an experiment, distributed over hosts.

    Args:
        hosts: the hosts.
        task: what is learned.
        context: round context of the experiment.
        sizes: samples by client and split: train, validation, test; of all that may train, then of newcomers.
        policy: how to treat clients that fail; by default the run fails.
        samples_in: gives the training samples n_k of all clients in a round, where that changes.
        summed: how many numbers a message may have, where epsilon depends on it; 0: any.

    Attributes:
        trained_scores: of the models published in this round.
        traffic: of this round.
        costs: of the clients' procedures in this round.
        updates: of the clients in this round.
        unscored: the clients that failed in the last evaluation and are not in its scores.
    """

    def __init__(
        self,
        hosts: Hosts,
        task: Task,
        context: RoundContext,
        sizes: np.ndarray,
        policy: ClientsConfig | None = None,
        samples_in: Callable[[int], np.ndarray] | None = None,
        summed: int = 0,
    ) -> None:
        super().__init__(task, context, sizes[:, 0])
        self._hosts = hosts
        self._samples_in, self._summed = samples_in, summed
        self._policy = policy or ClientsConfig()
        self._evaluation = Evaluation(self._hosts, sizes)
        self._trained_splits: tuple[str, ...] = ()
        self.trained_scores: Scores = {}
        self.traffic, self.costs, self.updates = Traffic(), Costs(), Updates()
        self._participation = Participation(context.round, None, {})
        self._deaths = HostDeaths(self._policy)
        self._unscorable: dict[int, Failure] = {}
        self._past: Mapping[int, Tree] = {}
        self._remembered: Tree = {}
        self.unscored: dict[int, Failure] = {}

    @property
    def waited_s(self) -> float:
        """Seconds of this round that the driver spent waiting for hosts."""
        return self._hosts.waited_s

    @property
    def lookups(self) -> Lookups:
        """Returns this round's counts of memory hits and misses for clients' states and samples."""
        return self._hosts.lookups

    def begin_round(
        self,
        round: int,
        trained_splits: Sequence[str] = (),
        cohort: Sequence[int] | None = None,
        absent: Mapping[int, Failure] | None = None,
        unscorable: Mapping[int, Failure] | None = None,
        started: Mapping[int, int] | None = None,
        past: Mapping[int, Tree] | None = None,
        moved_norm: float | None = None,
        remembered: Tree | None = None,
        asked: Sequence[int] = (),
        repeats: Mapping[int, int] | None = None,
    ) -> None:
        """Begins a round, and takes hosts into use that have joined since the last one.

        Args:
            round: t, 0-indexed.
            trained_splits: models published in the round are scored on these (none: not at all).
            cohort: the sampled clients; None for all clients.
            absent: clients that failed in an earlier attempt at this round.
            unscorable: clients that failed in an evaluation after an earlier attempt.
            started: the earlier round in which a client of the cohort began, by client.
            past: the server's tree as sent in those rounds, by round.
            moved_norm: the clipping norm, where it is not the first one.
            remembered: what the rule of the section ``aggregator`` needs of earlier rounds.
            asked: the clients that began the round, with those that do not answer; empty where that is not known.
            repeats: how often clients count in the means of the round, of those that count more than once.
        """
        known = replace(self._context, round=round, final=False, started=dict(started or {}), asked=tuple(asked))
        counted = None if self._context.repeats is None else dict(repeats or {})
        self._context = replace(known, moved_norm=moved_norm, repeats=counted)
        if self._samples_in is not None:
            self._count(self._samples_in(round))
        self._past, self._remembered, self._trained_splits = dict(past or {}), remembered or {}, tuple(trained_splits)
        self._participation, self._unscorable = Participation(round, cohort, absent or {}), dict(unscorable or {})
        self._hosts.waited_s, self._hosts.lookups = 0.0, Lookups()
        self._hosts.grow()
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        self.trained_scores, self._releases, self.next_norm, self.changes, self.messages = {}, 0, None, {}, {}
        self.remembered = dict(self._remembered)
        self.traffic, self.costs, self.updates = Traffic(), Costs(), Updates()
        self._participation.begin_again()

    @property
    def absent(self) -> Mapping[int, Failure]:
        """The clients that have failed and take no part in this round."""
        return self._participation.absent

    def present(self, clients: Sequence[int]) -> list[int]:
        """Returns the clients that take part in this round."""
        return self._participation.present(clients)

    def play(self, algorithm: Algorithm, server: Tree, cohort: Sequence[int]) -> Tree:
        """Runs one round of a method, as if clients that fail in it had not been sampled.

        Args:
            algorithm: the method.
            server: the server's tree.
            cohort: the sampled clients.

        Returns:
            The entries of ``server`` that change; none if no client is left.

        Raises:
            ClientError: when a client failed that may not be left out.
            MethodError: when its code breaks the contract of methods, or writes in place to the server's tree, which a
                commit may be reading.
            RoundUndoneError: when clients' states must first be rolled back to before the round.
        """
        lent = WriteGuard({**server, **{f"(after round {round})": tree for round, tree in self._past.items()}})
        while True:
            self._participation.give_up_short(self._context, cohort)
            present = self.present(cohort)
            try:
                changed = run_round(algorithm, own_dicts(server), present, self) if present else {}
                self._participation.end()
                failed = False
            except ClientsFailedError:
                failed = True
                self._begin_attempt()
            if (leaf := lent.written()) is not None:
                raise MethodError(
                    f"{algorithm.name}: round {self._context.round + 1} on the server writes to {leaf!r} of its tree "
                    "in place: return new tensors (rayfl.params.copy, Tensor.clone)"
                )
            if not failed:
                return changed  # as the method has returned it: the caller checks it

    def received(self, client: int, server: Tree) -> Tree:
        """Returns the server's tree as of when a client of the cohort began; see ``algorithms.clients.Clients``."""
        began = self._context.started.get(client)
        return server if began is None else self._past[began]

    def on_server(self, procedure: Procedure, given: Tree) -> Tree:
        """Runs a procedure of the server on one host and returns its result; see ``algorithms.clients.Clients``."""
        return self.on_one_host(name_of(procedure), "server", given)

    def on_one_host(self, procedure: str, kind: str, given: Tree) -> Tree:
        """Has one host do a job of the server, ``server`` or ``value`` (:class:`Job`), and returns its result."""
        job = replace(self._job(procedure, kind, counted=False), attempts=1, skips=False)
        (result,) = self._hosts.dispatch(job, {SERVER: 1.0}, given, {})
        return from_numpy(result.values[SERVER])

    def evaluate(
        self,
        server: Tree,
        splits: Sequence[str],
        final: bool,
        payloads: Mapping[int, Tree] | None = None,
        clients: Sequence[int] | None = None,
        report: Callable[[int, int], None] | None = None,
        newcomers: bool = False,
        official: bool = False,
        losses: bool = False,
    ) -> Scores:
        """Scores the predictors of clients on all hosts; returns the scores by client, without :attr:`unscored`.

        Args:
            server: what all clients see of the server.
            splits: the splits to score on.
            final: whether this is the evaluation after the last round.
            payloads: what single clients see in addition.
            clients: whose predictors; None for all clients that may train.
            report: called with the number of clients scored so far and the total, as results arrive.
            newcomers: whether the clients are held out from training and join for the evaluation.
            official: whether clients' own models are also scored on the official test part.
            losses: whether to find the losses of training samples in place of scores; see ``actors.hosting.job.Job``.
        """
        everyone = range(self._context.num_clients) if clients is None else clients
        procedure = "newcomer_predictors" if newcomers else "predictors"
        job = self._job(procedure, "evaluate", splits=tuple(splits), final=final, official=official, losses=losses)
        left_out = {client: why for client, why in self._unscorable.items() if client in everyone}
        able = [client for client in everyone if client not in left_out]
        with self._attributed(job):
            alone = self._deaths.suspects(job)
            scores, found = self._evaluation.of_clients(job, able, server, payloads or {}, report, alone)
        self.unscored = left_out | found
        return scores

    def evaluate_official(self, server: Tree, samples: int) -> dict[str, Statistics]:
        """Scores the server's own models on the official test set, in parts distributed over all hosts.

        Args:
            server: what all clients see of the server.
            samples: size of the official test set.

        Returns:
            By model.
        """
        return self._evaluation.of_server(self._job("global_predictors", "official"), server, samples)

    def call(self, call: Call) -> Replies:
        """Runs a procedure on the participating clients; adds up the hosts' results as they arrive."""
        call = call.of(call.clients if call.required else self.present(call.clients))
        if call.counted:
            common = num_bytes(call.broadcast)
            for client in call.clients:
                whole = common + num_bytes(call.payloads.get(client, {}))
                self.traffic.add(client, down=whole if call.down is None else call.down[client])
        options = {"counted": call.counted, "summands": len(call.clients), "started": self._context.started}
        job = self._job(call.procedure, call.kind, splits=self._trained_splits, **options)
        replies = Replies()
        with self._attributed(job, call.required):
            for result in self._answers(job, call):
                malicious = self._context.attackers
                self.trained_scores.update({id: one for id, one in result.scores.items() if id not in malicious})
                self.costs.add(result)
                for client, size in result.upload_bytes.items():
                    self.traffic.add(client, up=size)
                self.updates.add(result.updates, job.round, call.procedure)
                replies.within += result.within
                for group, part in result.totals.items():
                    merge(replies.totals.setdefault(group, ExactSum()), part, job.round, call.procedure)
                replies.values.update({client: from_numpy(value) for client, value in result.values.items()})
        check_sum(self._context, call, replies, self._summed)
        return replies

    def _answers(self, job: Job, call: Call) -> Iterable[JobResult]:
        """Yields the hosts' results as they arrive; or all at once if failed clients may have to be left out."""
        costs = {client: float(n + 1) for client, n in zip(call.clients, self.num_samples(call.clients), strict=True)}
        alone = self._deaths.suspects(job)
        if not self._policy.skips:
            return self._hosts.dispatch(job, costs, call.broadcast, call.payloads, alone=alone)
        results = self._participation.completed(call)
        if results is None:
            results = list(self._hosts.dispatch(job, costs, call.broadcast, call.payloads, alone=alone))
        self._participation.record(call, results)
        return results

    def _attributed(self, job: Job, required: bool | None = False) -> AbstractContextManager[None]:
        return self._deaths.attributed(job, self._participation, self._unscorable, required)

    def _job(self, procedure: str, kind: str, **options: Any) -> Job:
        options |= {"attempts": self._policy.attempts, "skips": self._policy.skips}
        context = self._context
        options |= {"moved_norm": context.moved_norm, "repeats": context.repeats or {}}
        return Job(procedure, kind, context.round, (), **options)

    def start_commit(self, rounds_completed: int) -> dict[Any, int]:
        """Makes every host write its changed states; the next round may already run meanwhile."""
        return self._hosts.start_commit(rounds_completed)

    def finish_commit(self, handles: dict[Any, int], counts: dict[str, int] | None = None) -> dict[int, StoredFile]:
        """Waits for a commit started earlier; returns the files of the states it wrote, by client.

        Args:
            handles: of the commit; may be waited for on another thread, since nothing changes here.
            counts: receives how many states each of the files has, by its name.
        """
        return self._hosts.finish_commit(handles, counts)

    def adopt(self, committed: Mapping[int, StoredFile]) -> None:
        """Records which files of a commit hold the states."""
        self._hosts.committed = dict(committed)

    def rewind(self) -> list[int]:
        """Rolls back to the last adopted commit: replaces dead hosts, clears live ones; returns the replaced hosts."""
        return self._hosts.rewind()

    def held_states(self) -> dict[int, Tree]:
        """Returns all client states in the hosts' memory, by client."""
        return self._hosts.held_states()

    def close(self) -> None:
        """Stops the hosts."""
        self._hosts.close()
