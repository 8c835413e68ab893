"""The plain-Python class inside an actor: runs the procedures of the clients it hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.hosting.contract import check_predictors
from actors.hosting.device_states import DeviceStateCache
from actors.hosting.equipment import Equipment
from actors.hosting.failures import too_little_memory
from actors.hosting.global_random import GlobalGenerators
from actors.hosting.job import Job, JobResult
from actors.hosting.memory import Lookups
from actors.hosting.metering import Meter
from actors.hosting.outcomes import client_error
from actors.hosting.procedures import Procedures
from actors.hosting.running_clients import RunningClients
from actors.hosting.samples import Samples
from actors.hosting.scoring import Scorer
from actors.hosting.server_work import run_on_server
from actors.hosting.state import Change, ClientStates
from actors.hosting.sums import LEAST_BYTES, PartialSums, SumRange, extract_part, merge_sums, take_sums
from actors.hosting.valuing import AbandonedError, value_clients
from algorithms.base import Algorithm
from rayfl.data.backdoor import Backdoor
from rayfl.data.federated import FederatedDataset
from rayfl.data.sources.official import OFFICIAL_PIECE, OfficialTest
from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.engine.engine import Engine
from rayfl.engine.round_context import RoundContext
from rayfl.engine.scoring.input_attack import InputAttack
from rayfl.engine.updates.requests import SERVER
from rayfl.engine.updates.write_guard import WriteGuard
from rayfl.errors import ClientError, MethodError, RayflError, ResourceError, as_error
from rayfl.models.private_norm import PrivateNorm
from rayfl.params import Tree, from_numpy, to_numpy
from rayfl.storage.manifest import StoredFile
from rayfl.tasks.base import recorded_names


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
        device_state_memory: bytes of the device's memory for states that stay there, and as many for prefetched
            ones.
        read_ahead: whether samples of the next clients are read while those before are at work.
        backdoor: with whose trigger test samples are scored once more.
        input_attack: what changes validation and test samples when they are scored once more.

    Attributes:
        running: which clients' code runs just now.
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
        device_state_memory: int = 0,
        read_ahead: bool = True,
        backdoor: Backdoor | None = None,
        input_attack: InputAttack | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.engine = engine
        self.states = states
        self.running = RunningClients(tell)
        self._samples = Samples(dataset, engine.device, data_memory, context.unseen, read_ahead)
        self._device_states = DeviceStateCache(device_state_memory if engine.device.type != "cpu" else 0)
        rows, changes = engine.rows_per_step, (backdoor, input_attack)
        self._scorer = Scorer(engine.task, engine.device, dataset.spec, batch_size, rows, *changes)
        self._context = context
        self._last = dataset.num_clients
        self._official = official
        self._recorded = recorded_names(engine.task)
        self._norm = PrivateNorm(engine.task.network, context.train.private_norm, context.streams)
        self._generators = GlobalGenerators()
        self._abandoned = False

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
        with self.running.start_call(job):
            try:
                result = self._run(job, broadcast, *incoming)
                self.engine.check()  # work may be under way still
            except ClientError as error:
                error.printed = tuple(self.running.printed)
                self.engine.check(error)
                raise
            except Exception as error:
                self.engine.check(error)
                if ran_out_of_memory(error) and not isinstance(error, RayflError):
                    raise ResourceError(
                        f"{job.procedure} in round {job.round + 1}: {too_little_memory(error)}"
                    ) from error
                raise
            finally:
                self.engine.release()
        result.printed = self.running.printed
        return result

    def run_apart(
        self, job: Job, broadcast: Tree, *incoming: Mapping[int, Tree], least: int = LEAST_BYTES
    ) -> tuple[JobResult, PartialSums | None]:
        """Runs a job; its sums are the second result if they have ``least`` bytes or more, else there is none."""
        result = self.run(job, broadcast, *incoming)
        return result, take_sums(result, least)

    def merged(self, round: int, procedure: str, *parts: PartialSums) -> tuple[JobResult, PartialSums]:
        """The sums of several hosts as one; the first result says that there are some."""
        return JobResult(apart=True), merge_sums(parts, round, procedure)

    def part(self, sums: PartialSums, stretch: SumRange | None) -> JobResult:
        """See :func:`actors.hosting.sums.extract_part`."""
        return extract_part(sums, stretch)

    def _run(self, job: Job, broadcast: Tree, *incoming: Mapping[int, Tree]) -> JobResult:
        for states in incoming:
            self.states.receive(states)
        self.running.turn_to("restoring states")
        self.states.restore(job.committed)
        self.running.turn_to("preparing clients")
        self._samples.turn_to(job.round)
        own = Equipment(
            self.algorithm,
            self.engine,
            self.states,
            self._samples,
            self._scorer,
            self.running,
            self._context,
            self._device_states,
            self._norm,
            self._recorded,
            self._official,
            self._generators,
        )
        common = own.with_room(lambda: from_numpy(broadcast, self.engine.device))
        result = JobResult()
        if job.kind == "official":
            self._score_official(job, common, result)
            return result
        if job.kind == "server":
            result.values[SERVER] = own.with_room(lambda: to_numpy(self._served(job, common)))
            return result
        if job.kind == "value":
            try:
                valued = own.with_room(lambda: value_clients(own, job, common, lambda: self._abandoned))
            except AbandonedError:
                return JobResult(abandoned=True)
            result.values[SERVER] = to_numpy(valued)
            return result
        procedures, metered = Procedures(own, job, common, result), Meter(self.engine, own.scorer)
        waiting, places = self._ranked(job), {client: place for place, client in enumerate(job.clients)}
        try:
            while waiting and not self._abandoned:
                width = self.engine.width
                together, waiting = sorted(waiting[:width], key=places.__getitem__), waiting[width:]
                started = time.perf_counter()
                procedures.run(together, sorted(waiting[:width], key=places.__getitem__))
                each = (time.perf_counter() - started) / len(together)
                result.seconds.update(dict.fromkeys(together, each))
        finally:
            procedures.finish()
        if self._abandoned:
            return JobResult(abandoned=True)
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
        return run_on_server(self.algorithm, self.engine, self._samples, self._context, self.running, job, given)

    def _score_official(self, job: Job, server: Tree, result: JobResult) -> None:
        """Scores the server's own models on pieces of the official test part, which stand in the place of clients."""
        assert self._official is not None
        task, guard = self.engine.task, WriteGuard(server, self._recorded)
        try:
            predictors = self.algorithm.global_predictors(server, task)
            check_predictors(predictors, job.procedure)
            for piece in job.clients:
                if self._abandoned:
                    result.abandoned = True
                    break
                self.running.turn_to("scoring a piece of the official test part")
                first = (piece - self._last - 1) * OFFICIAL_PIECE
                part = self._official().load(first, first + OFFICIAL_PIECE)
                result.scores[piece] = {"official": self._scorer.score_official(predictors, part, first)}
        except BaseException as error:
            raise client_error(as_error(error), "the official test part", job, self.algorithm) from error
        if (leaf := guard.written()) is not None:
            raise MethodError(
                f"{self.algorithm.name}: global_predictors, or a predictor of it, writes to the server's {leaf!r} "
                "in place: work on a copy (rayfl.params.copy, Tensor.clone)"
            )

    def release(self, clients: Sequence[int]) -> dict[int, Tree]:
        """Gives up the states of clients that move to another host."""
        return self.states.release(clients)

    def commit(self, rounds_completed: int) -> list[tuple[StoredFile, dict[int, Change]]]:
        """Writes the states that changed before ``rounds_completed``; see :meth:`ClientStates.write`."""
        with self.running.committing():
            return self.states.write(rounds_completed)

    def abandon(self) -> None:
        """Has the job under way end before its next stack of clients, and jobs that wait do nothing, up to a rewind.

        Another thread calls it: what the driver no longer reads must not hold up the rewind behind it.
        """
        self._abandoned = True

    def rewind(self) -> None:
        """Forgets all states; the next jobs say which commit to restore them from."""
        self._abandoned = False
        self._samples.lookups, self.states.lookups = Lookups(), Lookups()
        self.states.rewind()
        self._device_states.clear()

    def held_states(self) -> dict[int, Tree]:
        """The states in memory as NumPy trees, by client."""
        return {client: to_numpy(state) for client, state in self.states.all().items()}


def _reorder(found: dict[int, Any], clients: Sequence[int]) -> None:
    """Puts entries into the order of their clients."""
    for client in clients:
        if client in found:
            found[client] = found.pop(client)
