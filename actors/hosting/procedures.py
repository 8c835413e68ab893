"""Runs the procedures of a job's clients, as many together as fit into the device's memory."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from actors.hosting.contract import are_predictors, check_keepable, check_noised, start_procedure
from actors.hosting.equipment import Equipment
from actors.hosting.failures import Failure, reason_of
from actors.hosting.job import ClientResult, Job, JobResult
from actors.hosting.outcomes import Inputs, client_error, collect, load_inputs, update_of, wait_for_inputs
from actors.hosting.outgoing import Outgoing
from actors.hosting.replies import found_of
from actors.hosting.scoring import SplitScores
from actors.hosting.state import Signature
from actors.hosting.storing import Storing
from algorithms.clients import no_sum
from rayfl.aggregation.magnitudes import check_finite
from rayfl.diagnosis.device_errors import free_device_memory, ran_out_of_memory
from rayfl.diagnosis.tracebacks import complete
from rayfl.engine.client import Client
from rayfl.engine.transfers import copy_stream
from rayfl.engine.updates.stragglers import WHOLE
from rayfl.engine.updates.trampoline import run_procedures
from rayfl.engine.updates.write_guard import WriteGuard
from rayfl.errors import ClientError, MethodError, RayflError, as_error, forget_frames
from rayfl.naming.objects import names_an_object
from rayfl.params import Tree, own_dicts


class Procedures:
    """Runs the procedures of one job.

    Args:
        own: the host's equipment.
        job: job to run.
        common: keyword arguments equal for all clients, on the device.
        result: result of the job, to which the clients' results are added.
    """

    def __init__(self, own: Equipment, job: Job, common: Tree, result: JobResult) -> None:
        self._own = own
        self._job = job
        self._common = common
        self._result = result
        self._context = replace(
            own.context, round=job.round, final=job.final, started=job.started, moved_norm=job.moved_norm
        )
        self._next: tuple[int, ...] = ()
        self._storing = Storing(own, job)
        self._prefetched: tuple[tuple[int, ...], Inputs] | None = None

    def run(self, ids: Sequence[int], following: Sequence[int] = ()) -> None:
        """Runs the procedures of some clients together.

        Args:
            ids: ids of the clients.
            following: clients that most likely run next; their inputs are prefetched while the device is still busy.

        Raises:
            ClientError: naming the client that failed, if none may be left out.
        """
        job, result = self._job, self._result
        self._next = tuple(following)
        self._own.samples.expect(ids, following)
        for failed_before in range(job.attempts):
            failed = self._attempt_in_parts(ids)
            if failed_before:
                result.retried.update({id: failed_before for id in ids if id not in failed})
            ids = list(failed)
            if not ids:
                return
        for id, error in failed.items():
            # An error of the files, the disk or the method would occur with every client.
            if not job.skips or isinstance(error, RayflError):
                raise self._error(error, id) from error
            result.failures[id] = Failure(job.procedure, reason_of(error), complete(error))

    def finish(self) -> None:
        """Stores the states that are still being copied; to be called after the last :meth:`run`."""
        self._storing.finish()

    def _attempt_in_parts(self, ids: Sequence[int]) -> dict[int, Exception]:
        """Runs the procedures of some clients, fewer at a time if the device's memory is too small for all.

        Nothing of a failed attempt is kept, so that the next one has the same inputs and random numbers.

        Returns:
            The errors of clients that failed even when they were run alone.
        """
        failed = self._attempt(ids)
        for error in failed.values():
            forget_frames(error)  # they would keep the whole stack's tensors
        short = [id for id in ids if id in failed and ran_out_of_memory(failed[id])]
        if not short:
            return failed
        self._prefetched = None
        self._storing.finish()
        self._own.make_room([failed.pop(id) for id in short])
        if len(ids) == 1:
            return self._attempt(ids)
        half = (len(ids) + 1) // 2
        self._own.engine.limit_width(half)
        for start in range(0, len(short), half):
            failed |= self._attempt_in_parts(short[start : start + half])
        return failed

    def _attempt(self, ids: Sequence[int]) -> dict[int, Exception]:
        """Runs the procedures of some clients; returns the errors of those that failed. Nothing of these is kept."""
        job, own = self._job, self._own
        try:
            states, payloads, received = self._inputs(ids)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return dict.fromkeys(ids, error)
        clients, coroutines, failed = self._start(ids, states, payloads)
        before = {id: Signature(client.state) for id, client in clients.items()}
        common = {"what is sent to all clients": WriteGuard(self._common, own.recorded)}
        # A client can reach what it was sent itself, so no turn costs a look at what all of the others share.
        several = job.common_to_several(ids, received)
        shared = {
            id: {**common, "what is sent to several clients": WriteGuard(tensors, own.recorded)}
            for id, tensors in several.items()
        }

        # A GPU would be waited for after each turn of each client: there values are compared when the stack has ended.
        late = len(clients) > 1 and own.engine.device.type != "cpu"

        def check_inputs(id: int) -> None:
            self._check_shared(shared.get(id, common), id, recorded=not late)

        outgoing = Outgoing(own, job, self._common, clients, self._context.clip_norm)
        own.running.begin(list(clients))
        unseeded = own.generators.states() if names_an_object(own.algorithm.name) else {}
        outcomes = run_procedures(coroutines, own.engine, own.running.switch_to, check_inputs)
        own.running.switch_to(tuple(clients))
        for remark in own.generators.remarks(unseeded):
            own.running.add_line(remark)
        outcomes = outgoing.sent(outcomes)
        scored = self._scored_together(clients, outcomes)
        self._storing.finish()  # the states of the clients before were copied while these steps were launched
        following = self._next
        self._prefetch()
        updates = {
            id: update_of(own.algorithm, own.engine.task, job, outcome, self._common)
            for id, outcome in outcomes.items()
        }
        changed = {id for id in clients if job.kind != "evaluate" and before[id].is_other(clients[id].state)}
        leaving = {id: clients[id].state for id in clients if id in changed}
        later = self._storing.may_wait(leaving, following)
        known, on_cpu = collect(own.engine.device, job, outcomes, updates, leaving, later)
        for id, client in clients.items():
            own.running.switch_to((id,))
            written = before[id].written()
            if written is not None:
                # The stored state, which a commit may be writing now, has the same tensors.
                wrong = MethodError(f"writes to its state's {written!r} in place: assign a new tensor")
                raise self._error(wrong, id)
            try:
                # Whatever can fail for this client alone must fail before anything of it is kept.
                found = found_of(own, job, client, outcomes[id], updates[id], scored.get(id, {}), known)
                if job.kind != "evaluate":
                    check_noised(own.algorithm, client)
                if id in changed:
                    check_keepable(client.state)
                    check_finite(client.state, known)
            except BaseException as error:
                failed[id] = as_error(error)
                own.engine.check(failed[id])
            if job.splits:
                check_inputs(id)  # its predictors are code, too, and have just been run
            if id not in failed:
                self._absorb(id, found)
        own.running.switch_to(())
        if late:
            guards = {guard: of for group in (common, *shared.values()) for of, guard in group.items()}
            for guard, of in guards.items():
                self._check_shared({of: guard}, "the clients")
        self._storing.begin({id: state for id, state in leaving.items() if id not in failed}, on_cpu)
        if not later:
            self._storing.finish()
        return failed

    def _inputs(self, ids: Sequence[int]) -> Inputs:
        """Returns the inputs of some clients on the device, prefetched or loaded now."""
        ahead, self._prefetched = self._prefetched, None
        if ahead is not None and ahead[0] == tuple(ids):
            return wait_for_inputs(self._own.engine.device, ahead[1])
        return load_inputs(self._own.engine.device, self._job, ids, self._own.state_of)

    def _prefetch(self) -> None:
        """Starts to load the next clients' inputs while the device still executes launched work."""
        own, ids, self._next = self._own, self._next, ()
        away = [kept for id in ids if (kept := own.states.handle(id)) and own.device_states.get(id, kept) is None]
        if not 0 < sum(kept.size for kept in away) <= own.device_states.limit:
            return
        try:
            with copy_stream(own.engine.device):
                self._prefetched = ids, load_inputs(own.engine.device, self._job, ids, own.state_of)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            # The inputs are then loaded when they are needed.
            own.device_states.disable()
            free_device_memory(error)

    def _start(
        self, ids: Sequence[int], states: dict[int, Tree], payloads: dict[int, Tree]
    ) -> tuple[dict[int, Client], dict[int, Coroutine[Any, Any, Any]], dict[int, Exception]]:
        """Returns the clients, their started procedures, and the errors of clients that do not fit into memory."""
        job, own = self._job, self._own
        clients: dict[int, Client] = {}
        coroutines: dict[int, Coroutine[Any, Any, Any]] = {}
        failed: dict[int, Exception] = {}
        procedure = getattr(own.algorithm, job.procedure)
        for id in ids:
            try:
                client = self._client(id, states.pop(id))
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
                raise self._error(error, id) from error
        return clients, coroutines, failed

    def _absorb(self, id: int, found: ClientResult) -> None:
        """Adds a client's result to the job's."""
        try:
            self._result.absorb(id, found)
        except (OverflowError, ValueError) as error:
            raise no_sum(error, self._job.round, self._job.procedure) from error
        except Exception as error:
            raise self._error(error, id) from error

    def _check_shared(self, shared: Mapping[str, WriteGuard], id: int | str, recorded: bool = True) -> None:
        """Raises an error if a client has written to tensors that other clients, or later rounds, read.

        Args:
            shared: by what they are, the tensors.
            id: the client, or several in words.
            recorded: whether to compare the values of module buffers.
        """
        for of, tensors in shared.items():
            if (leaf := tensors.written(recorded)) is not None:
                what = f"{leaf!r} of {of}"
                break
        else:
            if isinstance(id, str) or (part := self._own.samples.written(id)) is None:
                return
            what = f"{part}, which are read once for all rounds"
        method = self._own.algorithm.name
        error = MethodError(f"{method} writes to {what}, in place: work on a copy (rayfl.params.copy, Tensor.clone)")
        raise self._error(error, id)

    def _scored_together(self, clients: Mapping[int, Client], outcomes: Mapping[int, Any]) -> dict[int, SplitScores]:
        """Returns the scores of predictors that can be scored in stacks of clients.

        None on CPUs: fewer launches gain little there, and separate scores have the bits of clients that run alone.
        """
        job, engine = self._job, self._own.engine
        if not engine.vectorized or engine.device.type == "cpu" or len(clients) < 2 or not job.splits:
            return {}
        made = {id: outcomes[id] if job.kind == "evaluate" else client.published for id, client in clients.items()}
        sound = {id: found for id, found in made.items() if are_predictors(found) and found}
        self._own.running.switch_to(tuple(sound))
        return self._own.scorer.score_together(sound, job.splits, self._own.samples.of)

    def _client(self, id: int, state: Tree) -> Client:
        own, context = self._own, self._context
        samples = own.samples.of(id)
        work = context.work_of(id) if context.train.stragglers and self._job.kind != "evaluate" else WHOLE
        return Client(id, state, samples, own.engine.task, context, own.engine.device, own.samples.public, work)

    def _error(self, error: Exception, client: int | str) -> ClientError:
        return client_error(error, client, self._job, self._own.algorithm)
