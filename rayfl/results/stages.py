"""What is left of earlier stages: scores by the stage after which they were found, and by the stage of the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rayfl.metrics import Metric
from rayfl.naming.splits import stage_in
from rayfl.results.personalized import PersonalizedRows
from rayfl.results.schemas import first_metric


@dataclass(frozen=True)
class ByStage:
    """Scores of one row of models, mean over clients.

    Attributes:
        metric: which.
        scores: R, float64 of shape (S', S'): row s after stage s, column j on test samples of stage j; nan above the
            diagonal, and where no client has samples.
    """

    metric: Metric
    scores: np.ndarray

    @property
    def average(self) -> float:
        """Mean over the stages so far, after the last one; nan where one has no score."""
        return float(self.scores[-1].mean())

    @property
    def forgetting(self) -> float:
        """F, how much worse than at their best earlier stages are, on average (Chaudhry et al., ECCV 2018, eq. 3).

        Of a metric for which lower is better, how much greater. nan with one stage.
        """
        if len(self.scores) < 2:
            return float("nan")
        earlier = self.metric.sign * self.scores[:, :-1]
        return float((np.fmax.reduce(earlier[:-1], axis=0) - earlier[-1]).mean())

    @property
    def backward_transfer(self) -> float:
        """BWT, how much better earlier stages are than right after them (Lopez-Paz and Ranzato, NeurIPS 2017, eq. 3).

        Negative where they were forgotten; of a metric for which lower is better, with the other sign. nan with one
        stage.
        """
        if len(self.scores) < 2:
            return float("nan")
        last = self.metric.sign * (self.scores[-1] - np.diagonal(self.scores))
        return float(last[:-1].mean())


def by_stage(
    rounds: pa.Table, stage_of: Callable[[int], int], own: PersonalizedRows, metric: Metric | None = None
) -> ByStage | None:
    """Returns the scores by stage of a method's personalized model; None where none are recorded.

    Of a method that sweeps, they are those of the row chosen on validation data.

    Args:
        rounds: schema ``rayfl.results.schemas.ROUNDS_SCHEMA``.
        stage_of: gives the stage of a round, both from 0.
        own: which rows are the method's.
        metric: one of the task's; its first if left out.
    """
    chosen = first_metric(rounds) if metric is None else metric
    found: dict[tuple[int, int], float] = {}
    for row in rounds.to_pylist():
        of = stage_in(row["split"])
        if of is None or (row["cohort"], row["phase"]) != ("all", "received") or not own.is_summary(row):
            continue
        value = row[chosen.name]
        found[stage_of(row["round"] - 1), of] = float("nan") if value is None else value
    if not found:
        return None
    size = max(after for after, _ in found) + 1
    scores = np.full((size, size), np.nan)
    for place, value in found.items():
        scores[place] = value
    return ByStage(chosen, scores)
