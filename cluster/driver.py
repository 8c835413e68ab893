"""The round loop of one experiment: sample, train, aggregate, evaluate, commit; rewind when a host dies."""

from __future__ import annotations

from collections.abc import Sequence

from actors.federation import Federation
from actors.pool import HostDiedError
from cluster.recorder import Progress, Recorder
from rayfl.errors import RunError
from rayfl.experiment import Parts
from rayfl.stopwatch import Stopwatch
from rayfl.tables import ResultTables, Scores
from rayfl.tracking.callback import Callback


class Driver:
    """Coordinates one experiment.

    Args:
        parts: data set, task and context.
        federation: the clients.
        recorder: commits.
        callbacks: listeners.
    """

    def __init__(
        self, parts: Parts, federation: Federation, recorder: Recorder, callbacks: Sequence[Callback] = ()
    ) -> None:
        self._parts = parts
        self._config = parts.config
        self._algorithm = parts.config.algorithm
        self._federation = federation
        self._recorder = recorder
        self._callbacks = list(callbacks)
        self._failures = 0
        self.progress = self._restored()

    def run(self) -> Progress:
        """Runs what is left of the experiment.

        Raises:
            ClientError: when a client's procedure failed.
            RunError: when hosts died more often than ``max_failures``, or nothing can be written.
        """
        while self.progress.rounds_completed < self._config.train.rounds:
            try:
                self._round()
                if self.progress.rounds_completed == self._config.train.rounds:
                    self._finish_commit()
            except HostDiedError as death:
                self._recover(death)
        return self.progress

    def settle(self) -> None:
        """Lets a commit under way end, whatever becomes of it: an interrupted run keeps what it had."""
        self._recorder.abandon()

    def _round(self) -> None:
        watch = Stopwatch()
        round = self.progress.rounds_completed
        cohort = self._parts.cohort(round)
        evaluation = self._config.evaluation
        scored = evaluation.cohort_every and (round + 1) % evaluation.cohort_every == 0
        self._federation.begin_round(round, evaluation.splits if scored else ())
        changed = self._algorithm.round(self.progress.server, cohort, self._federation)
        watch.lap("server", less={"clients": self._federation.waited_s})
        progress = self._advance(changed)
        if scored:
            self._record("selected", "trained", self._federation.trained_scores, progress)
        self._finish_commit()
        watch.lap("commit")
        if scored and evaluation.cohort_received:
            self._record("selected", "received", self._evaluate(progress, False, cohort), progress)
        final = progress.rounds_completed == self._config.train.rounds
        if final or progress.rounds_completed % evaluation.every == 0:
            self._record("all", "received", self._evaluate(progress, final), progress)
        watch.lap("evaluation")
        self.progress = progress
        if final or progress.rounds_completed % self._config.storage.commit_every == 0:
            self._recorder.start(progress, self._federation)
        for callback in self._callbacks:
            callback.on_phases(progress.rounds_completed, watch.laps)
            callback.on_round(progress.rounds_completed, cohort, watch.total)

    def _evaluate(self, progress: Progress, final: bool, clients: Sequence[int] | None = None) -> Scores:
        common, own = self._algorithm.served(progress.server, self._parts.context)
        splits = self._config.evaluation.splits
        return self._federation.evaluate(common, splits, final, own, clients, self._report)

    def _report(self, done: int, total: int) -> None:
        for callback in self._callbacks:
            callback.on_evaluation_progress(done, total)

    def _advance(self, changed: dict[str, object]) -> Progress:
        """The progress after a round, apart from the one before it, which a crash may still return to."""
        before, traffic = self.progress, self._federation.traffic
        return Progress(
            before.rounds_completed + 1,
            {**before.server, **changed},
            before.tables.with_rows(before.tables.clients, before.tables.rounds),
            before.bytes_down + traffic.down,
            before.bytes_up + traffic.up,
        )

    def _record(self, cohort: str, phase: str, scores: Scores, progress: Progress) -> None:
        totals = (progress.bytes_down, progress.bytes_up)
        selected = cohort == "selected"
        rows = progress.tables.add(
            progress.rounds_completed,
            cohort,
            phase,
            scores,
            totals,
            self._federation.traffic.by_client if selected else None,
            self._federation.update_variance() if selected else None,
        )
        for callback in self._callbacks:
            callback.on_evaluation(rows)

    def _finish_commit(self) -> None:
        committed = self._recorder.finish(self._federation)
        if committed is not None:
            for callback in self._callbacks:
                callback.on_commit(committed)

    def _recover(self, death: HostDiedError) -> None:
        """Back to the last commit, with new actors in place of the dead ones.

        An actor may die while others are replaced: that counts as one more failure.
        """
        while True:
            self._failures += 1
            if 0 <= self._config.max_failures < self._failures:
                raise RunError(
                    f"gave up after {self._failures} failures (max_failures={self._config.max_failures}); "
                    f"the last: {death}. Run the same command to continue from the last commit"
                ) from death
            self._recorder.abandon()
            self.progress = self._restored()
            try:
                self._federation.rewind()
                break
            except HostDiedError as again:
                death = again
        for callback in self._callbacks:
            callback.on_failure(str(death), self.progress.rounds_completed)

    def _restored(self) -> Progress:
        tables = ResultTables(self._parts.dataset.names, self._algorithm.sweep, self._parts.partition_hash)
        progress = self._recorder.restore(tables)
        self._federation.adopt(self._recorder.manifest.states if self._recorder.manifest is not None else {})
        if progress is None:
            return Progress(0, self._algorithm.init(self._parts.task, self._parts.context), tables)
        return progress
