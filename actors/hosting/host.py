"""The plain-Python class inside an actor: runs the procedures of the clients it hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from actors.hosting.at_work import AtWork
from actors.hosting.contract import are_predictors, begun, check_keepable, check_predictors, check_sendable
from actors.hosting.failures import Failure, reason_of, too_little_memory
from actors.hosting.job import Job, JobResult
from actors.hosting.memory import Lookups
from actors.hosting.metering import Meter
from actors.hosting.outcomes import blamed, brought, settled, update_of
from actors.hosting.samples import Samples
from actors.hosting.scoring import Scorer, SplitScores
from actors.hosting.server_work import served
from actors.hosting.state import Change, ClientStates, changed_in_place, signature
from algorithms.base import Algorithm
from rayfl.aggregation.exact_sum import (
    ExactSum,
    Extremes,
    Weighted,
    check_finite,
    too_large,
)
from rayfl.data.federated import FederatedDataset
from rayfl.data.sources.official import OFFICIAL_PIECE, OfficialTest
from rayfl.diagnosis.device_errors import free_device_memory, ran_out_of_memory
from rayfl.diagnosis.tracebacks import complete
from rayfl.engine.client import Client, RoundContext
from rayfl.engine.engine import Engine
from rayfl.engine.requests import SERVER
from rayfl.engine.tasks import Predictor, recorded_names
from rayfl.engine.trampoline import run_procedures
from rayfl.engine.untouched import Untouched
from rayfl.errors import ClientError, MethodError, RayflError, ResourceError, as_error
from rayfl.metrics import Statistics
from rayfl.models.private_norm import PrivateNorm
from rayfl.params import Tree, from_numpy, num_bytes, own_dicts, to_numpy
from rayfl.storage.manifest import StoredFile


class ClientHost:
    """Hosts clients: their data on the device, their states, and the engine that trains them.

    Args:
        algorithm: the method.
        engine: task, device and how to execute.
        dataset: the clients' samples; only hosted clients are loaded.
        context: round context of the experiment (its round is set by each job).
        states: the states of the hosted clients.
        batch_size: evaluation batch size.
        data_memory: bytes of clients' samples that stay loaded; None for no limit.
        official: opens the official test part, for experiments that score the server's model on it.
        tell: called with each line that clients' code prints, as soon as it does; None: results have them.

    Attributes:
        at_work: which clients' code runs just now.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        engine: Engine,
        dataset: FederatedDataset,
        context: RoundContext,
        states: ClientStates,
        batch_size: int,
        data_memory: int | None = None,
        official: Callable[[], OfficialTest] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.engine = engine
        self.states = states
        self.at_work = AtWork(tell)
        self._samples = Samples(dataset, engine.device, data_memory, context.unseen)
        self._scorer = Scorer(engine.task, engine.device, dataset.spec, batch_size)
        self._context = context
        self._last = dataset.num_clients
        self._official = official
        self._recorded = recorded_names(engine.task)
        self._norm = PrivateNorm(engine.task.network, context.train.private_norm, context.streams)

    def run(self, job: Job, broadcast: Tree, *incoming: Mapping[int, Tree]) -> JobResult:
        """Runs a job.

        Args:
            job: what to do.
            broadcast: keyword arguments equal for all clients, a NumPy tree.
            incoming: states of clients that move here from other hosts.

        Raises:
            ClientError: naming the client, when a procedure raised or returned non-finite values and no client may be
                left out.
            DeviceLostError: when this process can no longer compute on its device.
            ResourceError: when the device has too little memory for the broadcast.
        """
        with self.at_work.on(job):
            try:
                result = self._run(job, broadcast, *incoming)
                self.engine.check()  # work may be under way still
            except ClientError as error:
                error.printed = tuple(self.at_work.printed)
                self.engine.check(error)
                raise
            except Exception as error:
                self.engine.check(error)
                if ran_out_of_memory(error) and not isinstance(error, RayflError):
                    raise ResourceError(f"{job.procedure} in round {job.round}: {too_little_memory(error)}") from error
                raise
            finally:
                self.engine.release()
        result.printed = self.at_work.printed
        return result

    def _run(self, job: Job, broadcast: Tree, *incoming: Mapping[int, Tree]) -> JobResult:
        for states in incoming:
            self.states.receive(states)
        self.states.restore(job.committed)
        common = self._with_room(lambda: from_numpy(broadcast, self.engine.device))
        result = JobResult()
        if job.kind == "official":
            self._score_official(job, common, result)
            return result
        if job.kind == "server":
            result.values[SERVER] = self._with_room(lambda: to_numpy(self._served(job, common)))
            return result
        metered = Meter(self.engine)
        waiting, places = self._ranked(job), {client: place for place, client in enumerate(job.clients)}
        while waiting:
            width = self.engine.width
            together, waiting = sorted(waiting[:width], key=places.__getitem__), waiting[width:]
            started = time.perf_counter()
            self._run_together(job, together, common, result)
            each = (time.perf_counter() - started) / len(together)
            result.seconds.update(dict.fromkeys(together, each))
        metered.write(result)
        for found in (result.values, result.scores, result.upload_bytes, result.seconds):
            _reorder(found, job.clients)
        result.stateful = [client for client in job.clients if self.states.holds(client)]
        result.lookups = self._samples.lookups + self.states.lookups
        self._samples.lookups, self.states.lookups = Lookups(), Lookups()
        return result

    def _ranked(self, job: Job) -> tuple[int, ...]:
        """The clients of a job, first those that are run together first: where they are stacked, those alike.

        A stack makes as many steps as its longest client needs, and evaluates as many samples as its largest has.
        """
        if not self.engine.vectorized:
            return job.clients
        sizes = self._samples.sizes(job.splits if job.kind == "evaluate" else ("train",))
        return tuple(sorted(job.clients, key=lambda client: -sizes[client]))

    def _served(self, job: Job, given: Tree) -> Tree:
        return served(self.algorithm, self.engine, self._samples, self._context, self.at_work, job, given)

    def _run_together(self, job: Job, ids: Sequence[int], common: Tree, result: JobResult) -> None:
        for failed_before in range(job.attempts):
            failed = self._attempt_with_room(job, ids, common, result)
            if failed_before:
                result.retried.update({id: failed_before for id in ids if id not in failed})
            ids = list(failed)
            if not ids:
                return
        for id, error in failed.items():
            # What the files, the disk or the method are to blame for would come back with every client.
            if not job.skips or isinstance(error, RayflError):
                raise self._blame(error, id, job) from error
            result.failures[id] = Failure(job.procedure, reason_of(error), complete(error))

    def _attempt_with_room(self, job: Job, ids: Sequence[int], common: Tree, result: JobResult) -> dict[int, Exception]:
        """Runs the procedures of some clients, fewer at a time where the device's memory is too small for all.

        Of an attempt that failed nothing is kept, so that the next one has the same inputs and random numbers.

        Returns:
            The errors of those that failed alone, too.
        """
        failed = self._attempt(job, ids, common, result)
        short = [id for id in ids if id in failed and ran_out_of_memory(failed[id])]
        if not short:
            return failed
        self._make_room([failed.pop(id) for id in short])
        if len(ids) == 1:
            return self._attempt(job, ids, common, result)
        half = (len(ids) + 1) // 2
        self.engine.limit_width(half)
        for start in range(0, len(short), half):
            failed |= self._attempt_with_room(job, short[start : start + half], common, result)
        return failed

    def _with_room(self, work: Callable[[], Tree]) -> Tree:
        """Returns the result of some work, done again without kept samples where the device's memory is too small."""
        try:
            return work()
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            self._make_room([error])
        return work()

    def _make_room(self, errors: Sequence[Exception]) -> None:
        """Frees memory of the device that nothing depends on, and what errors hold."""
        self._samples.give_way()
        self.engine.release()
        free_device_memory(*errors)

    def _attempt(self, job: Job, ids: Sequence[int], common: Tree, result: JobResult) -> dict[int, Exception]:
        """Runs the procedures of some clients; returns the errors of those that failed, of which nothing is kept."""
        clients: dict[int, Client] = {}
        failed: dict[int, Exception] = {}
        procedure = getattr(self.algorithm, job.procedure)
        coroutines: dict[int, Coroutine[Any, Any, Any]] = {}
        try:
            states, payloads, received = brought(self.engine.device, job, ids, self.states.checkout)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return dict.fromkeys(ids, error)
        for id in ids:
            try:
                client = self._client(id, job, states.pop(id))
                given = {**own_dicts(common), **payloads.pop(id)}
                if self._norm.names:
                    given = self._norm.joined(given, client.state, self.engine.device)
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                failed[id] = error
                continue
            clients[id] = client
            try:
                coroutines[id] = begun(procedure, client, given, bundled=job.kind == "evaluate")
            except MethodError as error:
                raise self._blame(error, id, job) from error
        before = {id: signature(client.state) for id, client in clients.items()}
        lent = {
            "what is sent to all clients": Untouched(common, self._recorded),
            "what is sent to several clients": Untouched(job.common_to_several(ids, received), self._recorded),
        }

        def unharmed(id: int) -> None:
            self._check_lent(lent, id, job)

        self.at_work.begin(list(clients))
        outcomes = run_procedures(coroutines, self.engine, self.at_work.turn_to, unharmed)
        outcomes = {id: self._kept_back(job, clients[id], outcome) for id, outcome in outcomes.items()}
        scored = self._scored_together(job, clients, outcomes)
        updates = {
            id: update_of(self.algorithm, self.engine.task, job, outcome, common) for id, outcome in outcomes.items()
        }
        changed = {id for id in clients if job.kind != "evaluate" and signature(clients[id].state) != before[id]}
        kept: Mapping[int, Tree] = {id: clients[id].state for id in changed}
        known, kept = settled(self.engine.device, job, outcomes, updates, kept)
        for id, client in clients.items():
            self.at_work.turn_to((id,))
            spoilt = changed_in_place(before[id])
            if spoilt is not None:
                # The kept state, which a commit may be writing just now, has the same tensors.
                wrong = MethodError(f"writes to its state's {spoilt!r} in place: assign a new tensor")
                raise self._blame(wrong, id, job)
            try:
                # Everything that can go wrong with this client alone does so before anything of it is kept.
                own = self._checked(job, client, outcomes[id], updates[id], scored.get(id, {}), known)
                if id in changed:
                    check_keepable(client.state)
                    check_finite(client.state, known)
            except BaseException as error:
                failed[id] = as_error(error)
                self.engine.check(failed[id])
            unharmed(id)  # what it published or returned as a predictor is code, too
            if id in failed:
                continue
            try:
                result.absorb(own)
                if id in changed:
                    self.states.replace(id, kept[id], job.round)
            except Exception as error:
                # Of a sum that is too large, each client has but a part.
                raise self._blame(error, "the clients" if isinstance(error, OverflowError) else id, job) from error
        self.at_work.turn_to(())
        return failed

    def _check_lent(self, lent: Mapping[str, Untouched], id: int, job: Job) -> None:
        """Raises an error if a client has written to what others are given, too, or what it will be given again."""
        method = self.algorithm.name
        written = ((leaf, of) for of, tensors in lent.items() if (leaf := tensors.written()) is not None)
        if (first := next(written, None)) is not None:
            what = f"{first[0]!r} of {first[1]}"
        elif (part := self._samples.written(id)) is not None:
            what = f"{part}, which are read once for all rounds"
        else:
            return
        error = MethodError(f"{method} writes to {what}, in place: work on a copy (rayfl.params.copy, Tensor.clone)")
        raise self._blame(error, id, job)

    def _kept_back(self, job: Job, client: Client, outcome: Any) -> Any:
        """Moves what must stay with the client from a procedure's result into its state; returns the rest."""
        if not self._norm.names or job.kind == "evaluate" or not isinstance(outcome, Weighted | Mapping):
            return outcome
        try:
            if isinstance(outcome, Weighted):
                return replace(outcome, tree=self._norm.kept_back(outcome.tree, client.state))
            return self._norm.kept_back(outcome, client.state)
        except ValueError as error:
            return MethodError(f"{job.procedure} {error}")

    def _checked(
        self, job: Job, client: Client, outcome: Any, update: Any, scored: SplitScores, known: Extremes
    ) -> JobResult:
        """Returns one client's outcome as the result of a job, if it is fit to be one."""
        result = JobResult()
        if isinstance(outcome, Exception):
            raise outcome
        if job.kind == "evaluate":
            check_predictors(outcome, job.procedure)
            found = self._scorer.score_rest(outcome, job.splits, self._samples.of(client.id), scored)
            if job.official:
                found["official"] = self._scores_on_official(outcome)
            result.scores[client.id] = found
            return result
        if job.kind == "mean":
            if not isinstance(outcome, Weighted):
                raise MethodError(f"{job.procedure} must return Weighted to be averaged, got {type(outcome).__name__}")
            check_sendable(outcome.tree, job.procedure)
            total = ExactSum()
            total.add(outcome, known)
            if job.summands > 1 and not total.fits(job.summands if job.skips else 1):
                raise OverflowError(too_large(outcome))
            result.totals[outcome.group] = total
            if job.counted:
                result.upload_bytes[client.id] = num_bytes(outcome.tree)
            if isinstance(update, Exception):
                raise update
            if update is not None:
                result.updates.add(update, known)
        else:
            check_sendable(outcome, job.procedure)
            check_finite(outcome)
            result.values[client.id] = to_numpy(outcome)
            if job.counted:
                result.upload_bytes[client.id] = num_bytes(outcome)
        if client.published:
            check_predictors(client.published, f"{job.procedure} (client.publish)")
            offered, samples = client.published, self._samples.of(client.id)
            result.scores[client.id] = self._scorer.score_rest(offered, job.splits, samples, scored)
        return result

    def _scored_together(
        self, job: Job, clients: Mapping[int, Client], outcomes: Mapping[int, Any]
    ) -> dict[int, SplitScores]:
        """What of the clients' predictors can be scored in stacks of clients.

        On CPUs nothing: there is little to win by fewer launches, and sums are to the bit those of clients alone.
        """
        if not self.engine.vectorized or self.engine.device.type == "cpu" or len(clients) < 2 or not job.splits:
            return {}
        made = {id: outcomes[id] if job.kind == "evaluate" else client.published for id, client in clients.items()}
        sound = {id: found for id, found in made.items() if are_predictors(found) and found}
        self.at_work.turn_to(tuple(sound))
        return self._scorer.score_together(sound, job.splits, self._samples.of)

    def _scores_on_official(self, predictors: Mapping[str, Predictor]) -> dict[str, Statistics]:
        """The statistics, on the whole official test part, of a client's models that are not the server's own."""
        assert self._official is not None
        own = {name: predictor for name, predictor in predictors.items() if name != "global"}
        total = {name: Statistics.empty(self.engine.task.measures) for name in own}
        part = self._official()
        for first in range(0, len(part), OFFICIAL_PIECE):
            piece = self._samples.official(first, partial(part.load, first, first + OFFICIAL_PIECE))
            for name, statistics in self._scorer.score(own, piece).items():
                total[name] += statistics
        return total

    def _score_official(self, job: Job, server: Tree, result: JobResult) -> None:
        """Scores the server's own models on pieces of the official test part, which stand in the place of clients."""
        assert self._official is not None
        task, lent = self.engine.task, Untouched(server, self._recorded)
        try:
            predictors = self.algorithm.global_predictors(server, task)
            check_predictors(predictors, job.procedure)
            for piece in job.clients:
                first = (piece - self._last - 1) * OFFICIAL_PIECE
                part = self._official().load(first, first + OFFICIAL_PIECE)
                result.scores[piece] = {"official": self._scorer.score_official(predictors, part, first)}
        except BaseException as error:
            raise self._blame(as_error(error), "the official test part", job) from error
        if (leaf := lent.written()) is not None:
            raise MethodError(
                f"{self.algorithm.name}: global_predictors, or a predictor of it, writes to the server's {leaf!r} "
                "in place: work on a copy (rayfl.params.copy, Tensor.clone)"
            )

    def _client(self, id: int, job: Job, state: Tree) -> Client:
        context = replace(self._context, round=job.round, final=job.final, started=job.started)
        device = self.engine.device
        return Client(id, state, self._samples.of(id), self.engine.task, context, device, self._samples.public)

    def release(self, clients: Sequence[int]) -> dict[int, Tree]:
        """Gives up the states of clients that move to another host."""
        return self.states.release(clients)

    def commit(self, rounds_completed: int) -> list[tuple[StoredFile, dict[int, Change]]]:
        """Writes the states that changed before ``rounds_completed``; see :meth:`ClientStates.write`."""
        return self.states.write(rounds_completed)

    def rewind(self) -> None:
        """Forgets all states; the next jobs say which commit to restore them from."""
        self.states.rewind()

    def held_states(self) -> dict[int, Tree]:
        """The states in memory as NumPy trees, by client."""
        return {client: to_numpy(state) for client, state in self.states.all().items()}

    def _blame(self, error: Exception, client: int | str, job: Job) -> ClientError:
        return blamed(error, client, job, self.algorithm)


def _reorder(found: dict[int, Any], clients: Sequence[int]) -> None:
    """Puts entries into the order of their clients."""
    for client in clients:
        if client in found:
            found[client] = found.pop(client)
