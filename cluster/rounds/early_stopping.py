"""Decides after each evaluation of all clients whether a run ends before its last round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rayfl.config.schema import ExperimentConfig
from rayfl.metrics import Metric
from rayfl.sweeps.measures import Measure, evaluations


class EarlyStopping:
    """The metric that ``early_stopping`` watches, over the evaluations so far.

    What it knows follows from the rows of ``rounds.parquet`` alone, so that an interrupted run decides as an
    undisturbed one. Rows of an evaluation that a run of more rounds does not have, after a former last round, are left
    out.

    Args:
        config: the experiment.
        metrics: of the task.
        rows: of evaluations that are done (``rayfl.results.schemas.ROUNDS_SCHEMA``).

    Attributes:
        watched: whether any evaluation so far had the number that is watched.
        why: why the run ends with the newest evaluation, as :meth:`ends` has it.
    """

    def __init__(
        self, config: ExperimentConfig, metrics: tuple[Metric, ...], rows: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self._rule = config.early_stopping
        self._algorithm = config.algorithm
        self._measure = Measure(self._rule.metric or metrics[0].name, self._rule.model, "validation", metrics)
        self._best: tuple[int, float] | None = None
        self._worse = 0
        self.watched, self.why = False, ""
        for round, found in sorted(evaluations(rows).items()):
            if round % config.evaluation.every == 0:
                self.ends(round, found)

    def ends(self, rounds_completed: int, rows: Iterable[Mapping[str, Any]]) -> str:
        """Takes an evaluation into account.

        Args:
            rounds_completed: after how many rounds it was.
            rows: its summaries.

        Returns:
            Why the run ends with it; empty where it goes on.
        """
        self.why = self._judged(rounds_completed, rows)
        return self.why

    def _judged(self, rounds_completed: int, rows: Iterable[Mapping[str, Any]]) -> str:
        if not self._rule.on or rounds_completed <= self._rule.min_rounds:
            return ""
        value = self._measure.value(rows, self._algorithm)
        if value is None:
            return ""
        self.watched = True
        if self._reached(value):
            return f"{self._named} is {self._told(value)}, its target is {self._told(float(self._rule.target or 0))}"
        sign = self._measure.shown.sign
        if self._best is None or sign * (value - self._best[1]) > self._rule.min_delta:
            self._best, self._worse = (rounds_completed, value), 0
            return ""
        self._worse += 1
        if self._rule.patience is None or self._worse < self._rule.patience:
            return ""
        by = f" by more than {self._rule.min_delta:g}" if self._rule.min_delta else ""
        return (
            f"no evaluation of the last {self._worse} was better{by} than that after round {self._best[0]} "
            f"({self._named} {self._told(self._best[1])})"
        )

    def _reached(self, value: float) -> bool:
        target, sign = self._rule.target, self._measure.shown.sign
        return target is not None and sign * (value - target) >= 0

    @property
    def _named(self) -> str:
        return f"validation {self._measure.shown.label} of the {self._rule.model} model"

    def _told(self, value: float) -> str:
        return self._measure.shown.told(value)
