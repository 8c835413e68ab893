"""What an experiment has achieved: one number of one model, for comparing experiments with each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from rayfl.errors import ConfigError
from rayfl.metrics import CLASSIFICATION, Metric, first_best
from rayfl.results.personalized import PersonalizedRows, recorded_clients
from rayfl.results.schemas import METRICS

Model = Literal["personalized", "global"]
Judge = Literal["validation", "test"]


@dataclass(frozen=True)
class Measure:
    """By what experiments are compared.

    Attributes:
        metric: mean over clients, as in ``rounds.parquet``.
        model: ``personalized``, the method's own answer for a client, or ``global``.
        judge: the split that chooses, among experiments and among the members of a method's sweep.
        metrics: of the task.
    """

    metric: str = "top1"
    model: Model = "personalized"
    judge: Judge = "validation"
    metrics: tuple[Metric, ...] = CLASSIFICATION.metrics

    @classmethod
    def of_task(cls, metrics: Sequence[Metric], metric: str | None, model: Model, judge: Judge) -> Measure:
        """That of experiments on one task.

        Args:
            metrics: of the task.
            metric: by which they are compared; None: the first.
            model: whose.
            judge: see the class.

        Raises:
            ConfigError: the task has no such metric.
        """
        names = [known.name for known in metrics]
        if metric is not None and metric not in names:
            raise ConfigError(f"--metric: there is no {metric!r}; the task has {', '.join(names)}")
        if unranked := next((known for known in metrics if known.name == metric and not known.ranked), None):
            raise ConfigError(f"--metric: no {unranked.label} is better than another: choose {names[0]}")
        return cls(metric or names[0], model, judge, tuple(metrics))

    @property
    def shown(self) -> Metric:
        """The metric, with what is known of it."""
        return next(known for known in self.metrics if known.name == self.metric)

    @property
    def columns(self) -> list[str]:
        """The metrics that tables of a sweep have columns for."""
        return list(dict.fromkeys([*METRICS, *(known.name for known in self.metrics)]))

    @property
    def mode(self) -> Literal["max", "min"]:
        """Returns whether more is better."""
        return self.shown.mode

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
            first = self.metrics[0]
            known = {str(row["model"]): float(row[first.name]) for row in members if row[first.name] is not None}
            best = first_best(known, first.mode) if known else None
            return next((row for row in members if row["model"] == best), None)
        wanted = (own.summary[0], self.judge)
        return next((row for row in mine if (row["model"], row["selected_on"]) == wanted), None)

    def value(self, rows: Iterable[Mapping[str, Any]], algorithm: Any) -> float | None:
        """The judge's number of one round, None where it has none."""
        row = self.row(rows, algorithm, self.judge)
        return None if row is None or row[self.metric] is None else float(row[self.metric])

    def summary(self, rounds: pa.Table, algorithm: Any, clients: pa.Table | None = None) -> dict[str, Any]:
        """The model's metrics after the last evaluation of all clients: ``test_top1``, ``validation_loss``, ...

        ``clients`` is K; ``test_clients`` how many of them have samples (and, given their rows, the metric by which
        experiments are compared), and ``test_top1_std_over_clients`` the population standard deviation over these.

        Args:
            rounds: the experiment's summaries (``rayfl.results.schemas.ROUNDS_SCHEMA``).
            algorithm: the method.
            clients: the experiment's rows of clients; None where the metric is defined for every client with samples.
        """
        by_round = evaluations(rounds.to_pylist())
        last = by_round[max(by_round)] if by_round else []
        found: dict[str, Any] = {"clients": recorded_clients(rounds)}
        for split in ("validation", "test"):
            row = self.row(last, algorithm, split)
            found[f"{split}_clients"] = None if row is None else row["clients"] - self._undefined(row, clients)
            for metric in self.columns:
                name = f"{split}_{metric}"
                found[name] = None if row is None else row.get(metric)
                found[f"{name}_std_over_clients"] = None if row is None else row.get(f"{metric}_std")
        return found

    def _undefined(self, row: Mapping[str, Any], clients: pa.Table | None) -> int:
        """Returns for how many of a summary's clients the metric is undefined; 0 where each has a model of its own."""
        model = row.get("choice") if row["selected_on"] else row["model"]
        if clients is None or not model:
            return 0
        key = {name: row[name] for name in ("round", "cohort", "phase", "split")}
        own = reduce(and_, (pc.field(name) == value for name, value in {**key, "model": model}.items()))
        return int(clients.filter(own)[self.metric].null_count)


def evaluations(rows: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """The summaries of all clients, by round."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["cohort"] == "all":
            found.setdefault(int(row["round"]), []).append(row)
    return found
