"""What an experiment has achieved: one number of one model, for comparing experiments with each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from rayfl.metrics import first_best
from rayfl.results.personalized import PersonalizedRows, recorded_clients
from rayfl.results.schemas import METRICS

Metric = Literal["loss", "top1", "top5", "ece", "mce"]
Model = Literal["personalized", "global"]
Judge = Literal["validation", "test"]

_HIGHER_IS_BETTER = ("top1", "top5")


@dataclass(frozen=True)
class Measure:
    """By what experiments are compared.

    Attributes:
        metric: mean over clients, as in ``rounds.parquet``.
        model: ``personalized``, the method's own answer for a client, or ``global``.
        judge: the split that chooses, among experiments and among the members of a method's sweep.
    """

    metric: Metric = "top1"
    model: Model = "personalized"
    judge: Judge = "validation"

    @property
    def mode(self) -> Literal["max", "min"]:
        """Whether more is better."""
        return "max" if self.metric in _HIGHER_IS_BETTER else "min"

    def row(self, rows: Iterable[Mapping[str, Any]], algorithm: Any, split: str) -> Mapping[str, Any] | None:
        """The row of the model that is meant, None where there is none.

        Args:
            rows: the summaries of one round (``rayfl.results.schemas.ROUNDS_SCHEMA``).
            algorithm: the method; tells how its personalized model is called.
            split: of the row. For a method that sweeps (lambda), the member is the one that the judge prefers.
        """
        mine = [r for r in rows if (r["cohort"], r["phase"], r["split"]) == ("all", "received", split)]
        own = PersonalizedRows.of(algorithm) if self.model == "personalized" else PersonalizedRows("global")
        if own.sweep is None:
            return next((row for row in mine if own.is_summary(row)), None)
        if split == self.judge:
            members = [row for row in mine if own.is_member(row["model"]) and not row["selected_on"]]
            by_model = {str(row["model"]): float(row["top1"]) for row in members}
            best = first_best(by_model) if by_model else None
            return next((row for row in members if row["model"] == best), None)
        wanted = (own.summary[0], self.judge)
        return next((row for row in mine if (row["model"], row["selected_on"]) == wanted), None)

    def value(self, rows: Iterable[Mapping[str, Any]], algorithm: Any) -> float | None:
        """The judge's number of one round, None where it has none."""
        row = self.row(rows, algorithm, self.judge)
        return None if row is None else float(row[self.metric])

    def summary(self, rounds: pa.Table, algorithm: Any) -> dict[str, Any]:
        """The model's metrics after the last evaluation of all clients: ``test_top1``, ``validation_loss``, ...

        ``clients`` is K; ``test_clients`` how many of them the metrics are about, and ``test_top1_std_over_clients``
        the population standard deviation over these.
        """
        by_round = evaluations(rounds.to_pylist())
        last = by_round[max(by_round)] if by_round else []
        found: dict[str, Any] = {"clients": recorded_clients(rounds)}
        for split in ("validation", "test"):
            row = self.row(last, algorithm, split)
            found[f"{split}_clients"] = None if row is None else row["clients"]
            for metric in METRICS:
                name = f"{split}_{metric}"
                found[name] = None if row is None else row[metric]
                found[f"{name}_std_over_clients"] = None if row is None else row[f"{metric}_std"]
        return found


def evaluations(rows: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """The summaries of all clients, by round."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["cohort"] == "all":
            found.setdefault(int(row["round"]), []).append(row)
    return found
