"""The round loop of one experiment: sample, train, aggregate, evaluate, commit; rewind when a host dies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

from actors.federation.federation import Federation
from actors.hosting.contract import check_changes
from actors.hosting.failures import Failure, RoundUndoneError
from actors.processes.pool import HostDiedError
from cluster.rounds.early_stopping import EarlyStopping
from cluster.rounds.evaluations import Evaluations
from cluster.rounds.interrupts import StopRequest
from cluster.rounds.progress import Progress, empty_tables
from cluster.rounds.recorder import Recorder
from cluster.rounds.selecting import Chosen, Selector
from cluster.rounds.skipped import SkippedClients
from cluster.rounds.stopwatch import Stopwatch
from cluster.rounds.valuing import Valuer
from rayfl.aggregation.memory import of_rule
from rayfl.diagnosis.host_memory import MemoryKills
from rayfl.errors import RunError
from rayfl.experiment.parts import Parts
from rayfl.system.schedule import PROCEDURE, Turnout
from rayfl.tracking.callback import Callback

_log = logging.getLogger("rayfl")


class Driver:
    """Coordinates one experiment.

    Args:
        parts: data set, task and context.
        federation: the clients.
        recorder: commits.
        callbacks: listeners.
        stop: tells whether the run was asked to stop.
    """

    def __init__(
        self,
        parts: Parts,
        federation: Federation,
        recorder: Recorder,
        callbacks: Sequence[Callback],
        stop: StopRequest,
    ) -> None:
        self._parts = parts
        self._config = parts.config
        self._algorithm = parts.config.algorithm
        self._federation = federation
        self._recorder = recorder
        self._callbacks = list(callbacks)
        self._stop = stop
        self._failures, self._kills = 0, MemoryKills()
        self._skipped = SkippedClients()
        self._anybody = False
        self._absent: dict[int, dict[int, Failure]] = {}
        self._unscorable: dict[int, dict[int, Failure]] = {}
        self._evaluations = Evaluations(parts, federation, self._callbacks)
        self._selector = Selector(parts, federation)
        self._valuer = Valuer(parts, federation)
        self.progress = self._restored(thoroughly=True)

    def run(self) -> Progress:
        """Runs the remaining rounds of the experiment.

        Raises:
            ClientError: when a client failed that may not be left out.
            RunError: when hosts died more than ``max_failures`` times from one commit to the next, or nothing can be
                written.
            KeyboardInterrupt, Terminated: when the run was asked to stop; all completed rounds are committed then.
        """
        self._stop.patient = True
        begun = self.progress.rounds_completed
        while not self.progress.over(self._config.train.rounds):
            try:
                if self._stop.requested:
                    self._stop_here()
                self._round()
                if self.progress.over(self._config.train.rounds):
                    self._finish_commit()
            except HostDiedError as death:
                self._recover(death)
            except RoundUndoneError as undone:
                self._undo(undone)
        if begun < self.progress.rounds_completed and not self._anybody:
            _log.warning(
                "no client took part in any round after %d, so that nothing was trained: see skipped.parquet, and "
                "system's availability, deadline_s and dropout",
                begun,
            )
        if self._config.early_stopping.on and not self._evaluations.early.watched:
            _log.warning(
                "early_stopping: no evaluation had the number that it watches, so that nothing could end the run"
            )
        return self.progress

    def _stop_here(self) -> NoReturn:
        """Commits the rounds that are not committed yet, and ends the run."""
        self._stop.settle()
        if self._commit_begun != self.progress.rounds_completed:
            self._begin_commit(self.progress)
        self._finish_commit()
        raise self._stop.error()

    def settle(self) -> None:
        """Waits for the commit under way, so that an interrupted run keeps its last round."""
        self._stop.settle()
        self._recorder.abandon()

    def _round(self) -> None:
        watch = Stopwatch()
        round = self.progress.rounds_completed
        if not round and self._parts.num_unseen:
            self._evaluations.try_newcomer(self.progress)
        chosen = self._selector.choose(round, self.progress, self._unscorable.get(round))
        if chosen.known is not None:
            watch.lap("selection")
        turnout, cohort = chosen.turnout, list(chosen.turnout.cohort)
        evaluation = self._config.evaluation
        scored = evaluation.cohort_every and (round + 1) % evaluation.cohort_every == 0
        left_out = (self._absent.get(round), self._unscorable.get(round))
        self._federation.begin_round(
            round,
            evaluation.splits if scored else (),
            cohort,
            *left_out,
            started=turnout.started,
            past=self.progress.unfinished.past,
            moved_norm=self.progress.moved_norm,
            remembered=of_rule(self.progress.remembered, self._config.aggregator.name),
            asked=sorted({*cohort, *turnout.left_out}),
            repeats=chosen.repeats,
        )
        self._evaluations.unscored = {}
        changed = self._federation.play(self._algorithm, self.progress.server, cohort)
        check_changes(changed, self._algorithm, self.progress.server)
        cohort = self._federation.present(cohort)
        self._anybody |= bool(cohort)
        self._skipped.check_somebody(round, cohort, self._federation.absent)
        watch.lap("server", less={"clients": self._federation.waited_s})
        progress = self._advance(changed, chosen)
        if chosen.known is not None:
            watch.lap("selection")  # what is kept for the choices of later rounds
        if self._valuer.on:
            self._valuer.value(self.progress.server, progress)
            watch.lap("contribution")
        self._skipped.note(progress.rounds_completed, chosen.unscored, progress.tables)
        self._skipped.note(progress.rounds_completed, self._federation.absent, progress.tables)
        if scored:
            self._evaluations.trained(progress)
        self._finish_commit()
        watch.lap("commit")
        if scored and evaluation.cohort_received:
            self._evaluations.received(progress, cohort)
        why = ""
        ends_stage = self._config.stages.ends_after(done := progress.rounds_completed)
        if progress.over(rounds := self._config.train.rounds) or ends_stage or done % evaluation.every == 0:
            why = self._evaluations.everybody(progress)
            progress.ended_early = bool(why)
        self._skipped.note(progress.rounds_completed, self._evaluations.unscored, progress.tables)
        watch.lap("evaluation")
        self.progress = progress
        for callback in self._callbacks:
            callback.on_costs(progress.rounds_completed, self._federation.costs.as_line())
            callback.on_phases(progress.rounds_completed, {**watch.laps, **self._simulated(turnout)})
        if progress.over(rounds) or progress.rounds_completed % self._config.storage.commit_every == 0:
            self._begin_commit(progress)
        for callback in self._callbacks:
            callback.on_round(progress.rounds_completed, tuple(cohort), watch.total)
        if why:
            _log.info("ends early, after round %d of %d: %s", progress.rounds_completed, rounds, why)
            for callback in self._callbacks:
                callback.on_early_end(progress.rounds_completed, why)

    def _simulated(self, turnout: Turnout) -> dict[str, float]:
        return {} if self._parts.schedule is None else {"simulated": turnout.duration_us / 1e6}

    def _advance(self, changed: dict[str, object], chosen: Chosen) -> Progress:
        """Returns the progress after a round. The progress before it stays intact, because a crash may return to it."""
        before, traffic, turnout = self.progress, self._federation.traffic, chosen.turnout
        present = self._federation.present(turnout.cohort)
        # traffic leaves out clients that failed, but these had received the model for their losses
        in_vain = sum(size for client, size in chosen.sent.items() if client in {*turnout.cohort} - {*present})
        progress = Progress(
            before.rounds_completed + 1,
            {**before.server, **changed},
            before.tables.after(self._committed),
            before.bytes_down + traffic.down + chosen.bytes_down + in_vain,
            before.bytes_up + traffic.up + chosen.bytes_up,
            moved_norm=before.moved_norm if self._federation.next_norm is None else self._federation.next_norm,
            remembered={
                **self._federation.remembered,
                **self._selector.remembered(chosen, present, self._federation.changes),
            },
        )
        progress.tables.add_cohort(progress.rounds_completed, present, chosen.losses, chosen.repeats)
        progress.tables.clip_norm = self._federation.context.clip_norm
        if self._parts.schedule is not None:
            messages = [traffic.by_client[client] for client in turnout.cohort if client in traffic.by_client]
            progress.clock = before.clock.after(turnout.duration_us, messages, turnout.events)
            progress.tables.simulated_s = progress.clock.seconds
            sent = self._algorithm.sent(before.server)
            progress.unfinished = before.unfinished.after(before.rounds_completed, sent, turnout.under_way)
            progress.tables.staleness = {client: self._federation.context.staleness(client) for client in present}
            left_out = {client: (PROCEDURE, reason) for client, reason in turnout.left_out.items()}
            progress.tables.add_skipped(progress.rounds_completed, left_out)
        return progress

    def _begin_commit(self, progress: Progress) -> None:
        self._recorder.start(progress, self._federation)
        self._commit_begun = progress.rounds_completed

    def _finish_commit(self) -> None:
        committed = self._recorder.finish(self._federation)
        if committed is not None:
            self._committed = self._recorder.committed
            # A long run on machines that come and go dies often, but not often without getting on.
            self._failures = 0
            for callback in self._callbacks:
                callback.on_commit(committed)

    def _recover(self, death: HostDiedError) -> None:
        """Rewinds to the last commit, with new actors in place of the dead ones.

        An actor that dies while others are replaced counts as one more failure. One failure more than
        ``max_failures`` is allowed if repeating the round shows whether a client caused it.
        """
        while True:
            self._failures += 1
            if 0 <= self._config.max_failures < self._failures - death.investigated:
                raise RunError(
                    f"gave up after {self._failures} failures since the last commit "
                    f"(max_failures={self._config.max_failures}); "
                    f"the last: {death}{self._kills.remark()}. Run the same command to continue from the last commit"
                ) from death
            try:
                self._rewind()
                break
            except HostDiedError as again:
                death = again
        for callback in self._callbacks:
            callback.on_failure(f"{death}{self._kills.remark()}", self.progress.rounds_completed)

    def _undo(self, undone: RoundUndoneError) -> None:
        """Rewinds to the last commit, to repeat a round without the clients that failed in it."""
        # what an error knows of may lack clients of an earlier attempt: a pass for losses begins without them
        self._absent.setdefault(undone.round, {}).update(undone.failures)
        self._unscorable.setdefault(undone.round, {}).update(undone.unscorable)
        self._failures = max(0, self._failures - undone.deaths)
        try:
            self._rewind()
        except HostDiedError as death:
            self._recover(death)

    def _rewind(self) -> None:
        self._recorder.abandon()
        self.progress = self._restored()
        self._federation.rewind()

    def _restored(self, thoroughly: bool = False) -> Progress:
        tables = empty_tables(self._parts)
        progress = self._recorder.restore(tables, thoroughly)
        self._federation.adopt(self._recorder.manifest.states if self._recorder.manifest is not None else {})
        if progress is None:
            server = self._parts.initial_server()
            progress = Progress(0, server, tables)
            if self._parts.schedule is not None:
                progress.clock = self._parts.first_clock(server)
        if self._config.early_stopping.on:
            rows = self._recorder.rows("rounds").to_pylist()
            self._evaluations.early = EarlyStopping(self._config, self._parts.task.measures.metrics, rows)
        self._commit_begun = progress.rounds_completed
        self._committed = self._recorder.committed
        return progress
