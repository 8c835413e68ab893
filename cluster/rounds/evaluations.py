"""What is scored during a run, and the rows that come of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from actors.federation.federation import Federation
from actors.hosting.failures import Failure
from cluster.rounds.early_stopping import EarlyStopping
from cluster.rounds.progress import Progress
from rayfl.data.partitions.stage import NoStages
from rayfl.experiment.parts import Parts
from rayfl.naming.splits import split_of
from rayfl.results.personalized import check_personalized
from rayfl.results.summaries import Scores
from rayfl.tracking.callback import Callback

_log = logging.getLogger("rayfl")


class Evaluations:
    """Scores clients, records what was found, and tells the listeners.

    Args:
        parts: data set, task and context.
        federation: the clients.
        callbacks: listeners.

    Attributes:
        early: decides whether the run ends early; of the rows of all evaluations so far.
        unscored: clients that failed in this round's evaluations.
    """

    def __init__(self, parts: Parts, federation: Federation, callbacks: Sequence[Callback]) -> None:
        self._parts = parts
        self._config = parts.config
        self._algorithm = parts.config.algorithm
        self._federation = federation
        self._callbacks = callbacks
        self._said: set[str] = set()
        self.early = EarlyStopping(parts.config, parts.task.measures.metrics)
        self.unscored: dict[int, Failure] = {}

    def try_newcomer(self, progress: Progress) -> None:
        """Evaluates one newcomer before the first round, so that a method that cannot is refused early."""
        self._federation.begin_round(0)
        common, own = self._algorithm.served(progress.server, self._parts.context)
        first = [self._parts.context.newcomers[0]]
        self._federation.evaluate(common, self._config.evaluation.splits, False, own, first, newcomers=True)

    def trained(self, progress: Progress) -> None:
        """Records how the cohort has been scored right after training."""
        self._record("selected", "trained", self._federation.trained_scores, progress)

    def received(self, progress: Progress, cohort: Sequence[int]) -> None:
        """Scores the cohort on what it receives next."""
        self._record("selected", "received", self._scores(progress, False, self._parts.honest(cohort)), progress)

    def everybody(self, progress: Progress) -> str:
        """Scores all clients, or those that are drawn, and whatever else is scored together with them.

        Returns:
            Why the run ends with this evaluation, before its last round; empty where it does not.
        """
        final = progress.rounds_completed == self._config.train.rounds
        scores = self._scores(progress, final, self._parts.evaluated(progress.rounds_completed), official=True)
        why = "" if final else self._ends(scores, progress)
        if why:
            final = True
            scores = self._scores(progress, final, self._parts.everybody, official=True)
        self._record("all", "received", scores, progress)
        if self._parts.num_unseen:
            self._record("unseen", "received", self._scores(progress, final, newcomers=True, official=True), progress)
        if self._config.evaluation.official_test:
            self._record_official(progress)
        return why

    def _ends(self, scores: Scores, progress: Progress) -> str:
        if not self._config.early_stopping.on:
            return ""
        rows = progress.tables.after({}).add(progress.rounds_completed, "all", "received", scores, (0, 0))
        return self.early.ends(progress.rounds_completed, rows)

    def _scores(
        self,
        progress: Progress,
        final: bool,
        clients: Sequence[int] | None = None,
        newcomers: bool = False,
        official: bool = False,
    ) -> Scores:
        common, own = self._algorithm.served(progress.server, self._parts.context)
        splits, official = self._splits(progress), official and self._config.evaluation.official_personalized
        whose = self._parts.context.newcomers if newcomers else clients
        scores = self._federation.evaluate(common, splits, final, own, whose, self._report, newcomers, official)
        self.unscored |= self._federation.unscored
        check_personalized(self._algorithm, scores, final)
        return scores

    def _splits(self, progress: Progress) -> tuple[str, ...]:
        """Returns what is scored: at the end of a stage also the test samples of each stage so far, one by one."""
        stages, done = self._config.stages, progress.rounds_completed
        splits: tuple[str, ...] = self._config.evaluation.splits
        ends = stages.ends_after(done) or progress.over(self._config.train.rounds)
        if isinstance(stages, NoStages) or not (stages.retested and ends and "test" in splits):
            return splits
        return (*splits, *map(split_of, range(stages.stage_of(done - 1) + 1)))

    def _record_official(self, progress: Progress) -> None:
        common, _ = self._algorithm.served(progress.server, self._parts.context)
        scores = self._federation.evaluate_official(common, len(self._parts.official_test))
        totals = (progress.bytes_down, progress.bytes_up)
        rows = progress.tables.add_official(progress.rounds_completed, scores, totals)
        for callback in self._callbacks:
            callback.on_evaluation([dict(row) for row in rows])  # one may change them

    def _report(self, done: int, total: int) -> None:
        for callback in self._callbacks:
            callback.on_evaluation_progress(done, total)

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
            self._federation.updates.variance() if selected else None,
            self._federation.updates.product_error() if selected else None,
        )
        for sentence in progress.tables.undefined:
            if sentence not in self._said:
                self._said.add(sentence)
                _log.warning("%s", sentence)
        for callback in self._callbacks:
            callback.on_scores(progress.rounds_completed, cohort, phase, scores)
            callback.on_evaluation([dict(row) for row in rows])  # one may change them
