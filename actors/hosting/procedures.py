"""Runs the procedures of a job's clients, as many together as the device has room for."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from actors.hosting.contract import are_predictors, check_keepable, start_procedure
from actors.hosting.equipment import Equipment
from actors.hosting.failures import Failure, reason_of
from actors.hosting.job import ClientResult, Job, JobResult
from actors.hosting.outcomes import Brought, arrived, blamed, brought, settled, update_of
from actors.hosting.replies import found_of
from actors.hosting.scoring import SplitScores
from actors.hosting.state import Signature
from actors.hosting.storing import Storing
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.magnitudes import check_finite
from rayfl.diagnosis.device_errors import free_device_memory, ran_out_of_memory
from rayfl.diagnosis.tracebacks import complete
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.trampoline import run_procedures
from rayfl.engine.transfers import copy_stream
from rayfl.engine.write_guard import WriteGuard
from rayfl.errors import ClientError, MethodError, RayflError, as_error
from rayfl.params import Tree, own_dicts


class Procedures:
    """The procedures of one job.

    Args:
        own: what they are run with.
        job: which procedure, of which clients.
        common: keyword arguments equal for all clients, on the device.
        result: is added to.
    """

    def __init__(self, own: Equipment, job: Job, common: Tree, result: JobResult) -> None:
        self._own = own
        self._job = job
        self._common = common
        self._result = result
        self._next: tuple[int, ...] = ()
        self._storing = Storing(own, job)
        self._ahead: tuple[tuple[int, ...], Brought] | None = None

    def run(self, ids: Sequence[int], following: Sequence[int] = ()) -> None:
        """Runs the procedures of some clients together.

        Args:
            ids: whose.
            following: who comes next, most likely: what they need is brought to the device while it is still at work.

        Raises:
            ClientError: naming the client that failed, where none may be left out.
        """
        job, result = self._job, self._result
        self._next = tuple(following)
        self._own.samples.expect(ids, following)
        for failed_before in range(job.attempts):
            failed = self._attempt_with_room(ids)
            if failed_before:
                result.retried.update({id: failed_before for id in ids if id not in failed})
            ids = list(failed)
            if not ids:
                return
        for id, error in failed.items():
            # What the files, the disk or the method are to blame for would come back with every client.
            if not job.skips or isinstance(error, RayflError):
                raise self._blame(error, id) from error
            result.failures[id] = Failure(job.procedure, reason_of(error), complete(error))

    def finish(self) -> None:
        """Waits for the states that are on their way home; to be called after the last of :meth:`run`."""
        self._storing.finish()

    def _attempt_with_room(self, ids: Sequence[int]) -> dict[int, Exception]:
        """Runs the procedures of some clients, fewer at a time where the device's memory is too small for all.

        Of an attempt that failed nothing is kept, so that the next one has the same inputs and random numbers.

        Returns:
            The errors of those that failed alone, too.
        """
        failed = self._attempt(ids)
        short = [id for id in ids if id in failed and ran_out_of_memory(failed[id])]
        if not short:
            return failed
        self._ahead = None
        self._storing.finish()
        self._own.make_room([failed.pop(id) for id in short])
        if len(ids) == 1:
            return self._attempt(ids)
        half = (len(ids) + 1) // 2
        self._own.engine.limit_width(half)
        for start in range(0, len(short), half):
            failed |= self._attempt_with_room(short[start : start + half])
        return failed

    def _attempt(self, ids: Sequence[int]) -> dict[int, Exception]:
        """Runs the procedures of some clients; returns the errors of those that failed, of which nothing is kept."""
        job, own = self._job, self._own
        try:
            states, payloads, received = self._brought(ids)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return dict.fromkeys(ids, error)
        clients, coroutines, failed = self._begun(ids, states, payloads)
        before = {id: Signature(client.state) for id, client in clients.items()}
        lent = {"what is sent to all clients": WriteGuard(self._common, own.recorded)}
        if several := job.common_to_several(ids, received):
            lent["what is sent to several clients"] = WriteGuard(several, own.recorded)

        def unharmed(id: int) -> None:
            self._check_lent(lent, id)

        own.running.begin(list(clients))
        outcomes = run_procedures(coroutines, own.engine, own.running.switch_to, unharmed)
        outcomes = {id: self._kept_back(clients[id], outcome) for id, outcome in outcomes.items()}
        scored = self._scored_together(clients, outcomes)
        self._storing.finish()  # of those before: they came home while the device was asked for these steps
        following = self._next
        self._bring_ahead()
        updates = {
            id: update_of(own.algorithm, own.engine.task, job, outcome, self._common)
            for id, outcome in outcomes.items()
        }
        changed = {id for id in clients if job.kind != "evaluate" and before[id].is_other(clients[id].state)}
        leaving = {id: clients[id].state for id in clients if id in changed}
        later = self._storing.may_wait(leaving, following)
        known, home = settled(own.engine.device, job, outcomes, updates, leaving, later)
        for id, client in clients.items():
            own.running.switch_to((id,))
            spoilt = before[id].written()
            if spoilt is not None:
                # The kept state, which a commit may be writing just now, has the same tensors.
                wrong = MethodError(f"writes to its state's {spoilt!r} in place: assign a new tensor")
                raise self._blame(wrong, id)
            try:
                # Everything that can go wrong with this client alone does so before anything of it is kept.
                found = found_of(own, job, client, outcomes[id], updates[id], scored.get(id, {}), known)
                if id in changed:
                    check_keepable(client.state)
                    check_finite(client.state, known)
            except BaseException as error:
                failed[id] = as_error(error)
                own.engine.check(failed[id])
            if job.splits:
                unharmed(id)  # what it published or returned as a predictor is code, too
            if id not in failed:
                self._absorb(id, found)
        own.running.switch_to(())
        self._storing.begin({id: state for id, state in leaving.items() if id not in failed}, home)
        if not later:
            self._storing.finish()
        return failed

    def _brought(self, ids: Sequence[int]) -> Brought:
        """Returns what some clients need, on the device: brought ahead, or now."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == tuple(ids):
            return arrived(self._own.engine.device, ahead[1])
        return brought(self._own.engine.device, self._job, ids, self._own.state_of)

    def _bring_ahead(self) -> None:
        """Begins to bring what the next clients need: the device has still to do most of what it was asked for."""
        own, ids, self._next = self._own, self._next, ()
        away = [kept for id in ids if (kept := own.states.handle(id)) and own.device_states.get(id, kept) is None]
        if not 0 < sum(kept.size for kept in away) <= own.device_states.limit:
            return
        try:
            with copy_stream(own.engine.device):
                self._ahead = ids, brought(own.engine.device, self._job, ids, own.state_of)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            # It is brought when its turn comes, then.
            own.device_states.disable()
            free_device_memory(error)

    def _begun(
        self, ids: Sequence[int], states: dict[int, Tree], payloads: dict[int, Tree]
    ) -> tuple[dict[int, Client], dict[int, Coroutine[Any, Any, Any]], dict[int, Exception]]:
        """The clients and their procedures, and the errors of those for whom the device's memory is too small."""
        job, own = self._job, self._own
        context = replace(own.context, round=job.round, final=job.final, started=job.started)
        clients: dict[int, Client] = {}
        coroutines: dict[int, Coroutine[Any, Any, Any]] = {}
        failed: dict[int, Exception] = {}
        procedure = getattr(own.algorithm, job.procedure)
        for id in ids:
            try:
                client = self._client(id, states.pop(id), context)
                given = {**own_dicts(self._common), **payloads.pop(id)}
                if own.norm.names:
                    given = own.norm.joined(given, client.state, own.engine.device)
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                failed[id] = error
                continue
            clients[id] = client
            try:
                coroutines[id] = start_procedure(procedure, client, given, bundled=job.kind == "evaluate")
            except MethodError as error:
                raise self._blame(error, id) from error
        return clients, coroutines, failed

    def _absorb(self, id: int, found: ClientResult) -> None:
        """Adds what a client has done to the result."""
        try:
            self._result.absorb(id, found)
        except Exception as error:
            # Of a sum that is too large, each client has but a part.
            raise self._blame(error, "the clients" if isinstance(error, OverflowError) else id) from error

    def _check_lent(self, lent: Mapping[str, WriteGuard], id: int) -> None:
        """Raises an error if a client has written to what others are given, too, or what it will be given again."""
        for of, tensors in lent.items():
            if (leaf := tensors.written()) is not None:
                what = f"{leaf!r} of {of}"
                break
        else:
            if (part := self._own.samples.written(id)) is None:
                return
            what = f"{part}, which are read once for all rounds"
        method = self._own.algorithm.name
        error = MethodError(f"{method} writes to {what}, in place: work on a copy (rayfl.params.copy, Tensor.clone)")
        raise self._blame(error, id)

    def _kept_back(self, client: Client, outcome: Any) -> Any:
        """Moves what must stay with the client from a procedure's result into its state; returns the rest."""
        job = self._job
        if not self._own.norm.names or job.kind == "evaluate" or not isinstance(outcome, Weighted | Mapping):
            return outcome
        try:
            if isinstance(outcome, Weighted):
                return replace(outcome, tree=self._own.norm.kept_back(outcome.tree, client.state))
            return self._own.norm.kept_back(outcome, client.state)
        except ValueError as error:
            return MethodError(f"{job.procedure} {error}")

    def _scored_together(self, clients: Mapping[int, Client], outcomes: Mapping[int, Any]) -> dict[int, SplitScores]:
        """Returns what of the clients' predictors can be scored in stacks of clients.

        On CPUs nothing: there is little to win by fewer launches, and sums are to the bit those of clients alone.
        """
        job, engine = self._job, self._own.engine
        if not engine.vectorized or engine.device.type == "cpu" or len(clients) < 2 or not job.splits:
            return {}
        made = {id: outcomes[id] if job.kind == "evaluate" else client.published for id, client in clients.items()}
        sound = {id: found for id, found in made.items() if are_predictors(found) and found}
        self._own.running.switch_to(tuple(sound))
        return self._own.scorer.score_together(sound, job.splits, self._own.samples.of)

    def _client(self, id: int, state: Tree, context: RoundContext) -> Client:
        own = self._own
        samples = own.samples.of(id)
        return Client(id, state, samples, own.engine.task, context, own.engine.device, own.samples.public)

    def _blame(self, error: Exception, client: int | str) -> ClientError:
        return blamed(error, client, self._job, self._own.algorithm)
