"""The scores of one evaluation as columns, and what they are over clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayfl.metrics import CLASSIFICATION, Measures, Statistics, first_best, summarize
from rayfl.metrics.measures import DIVERGED
from rayfl.results.schemas import METRICS, own_metrics

Scores = Mapping[int, Mapping[str, Mapping[str, Statistics]]]
"""By client, split and model."""

Grid = dict[str, dict[int, int]]
"""By model and client, which entry."""


class ScoreTable:
    """The scores of one evaluation: an entry for each client, split and model, clients ascending.

    What has no samples is left out.

    Args:
        scores: what was found.
        measures: of the task.

    Attributes:
        clients: the client of each entry.
        splits: its split.
        models: its model.
        vectors: its statistics, float64 of shape (entries, ``measures.size``).
        metrics: its metrics by name, each float64 of shape (entries,); nan where one is undefined.
    """

    def __init__(self, scores: Scores, measures: Measures = CLASSIFICATION) -> None:
        self._measures = measures
        entries = [
            (client, split, model, statistics.vector)
            for client in sorted(scores)
            for split, models in scores[client].items()
            for model, statistics in models.items()
            if statistics.n
        ]
        self.clients = [entry[0] for entry in entries]
        self.splits = [entry[1] for entry in entries]
        self.models = [entry[2] for entry in entries]
        self.vectors = np.array([entry[3] for entry in entries]).reshape(-1, measures.size)
        self.metrics = measures.values(self.vectors)
        self._grids: dict[str, Grid] = {}
        for position, (client, split, model, _) in enumerate(entries):
            self._grids.setdefault(split, {}).setdefault(model, {})[client] = position

    def __len__(self) -> int:
        return len(self.clients)

    def summaries(self, sweep: str | None) -> list[tuple[dict[str, Any], Statistics]]:
        """A row for every split and model, and the statistics of all its samples together.

        Args:
            sweep: prefix of the models among which one is chosen (``lambda``), which makes more rows; or None.
        """
        found = [
            self._row(split, model, "", "", list(entries.values()))
            for split, grid in self._grids.items()
            for model, entries in grid.items()
        ]
        return found + (self._chosen(sweep) if sweep is not None else [])

    def _chosen(self, sweep: str) -> list[tuple[dict[str, Any], Statistics]]:
        """Rows of the sweep's best on test data (for all clients, and for each), training data, the official part."""
        grids = {
            split: {name: entries for name, entries in grid.items() if name.startswith(f"{sweep}=")}
            for split, grid in self._grids.items()
        }
        test = grids.get("test", {})
        others = [split for split, grid in grids.items() if grid and split not in ("validation", "test")]
        rows = []
        for judge in ("validation", "test"):
            grid = grids.get(judge, {})
            if not grid:
                continue
            means = {name: self._mean(list(entries.values())) for name, entries in grid.items()}
            best = first_best(means, self._measures.first.mode)
            if test:
                rows.append(self._row("test", f"{sweep}=best", judge, best, list(test[best].values())))
                each = [test[self._best_of(grid, client, best)][client] for client in next(iter(test.values()))]
                rows.append(self._row("test", f"{sweep}=best", f"{judge} per client", "", each))
            for split in others if judge == "validation" else ():
                rows.append(self._row(split, f"{sweep}=best", judge, best, list(grids[split][best].values())))
        return rows

    def _mean(self, entries: Sequence[int]) -> float:
        """Of the task's first metric, over the entries for which it is defined; the worst value where none is."""
        first = self._measures.first
        values = self._defined(first.name, entries)
        return float(values.mean()) if len(values) else -first.sign * float("inf")

    def _best_of(self, grid: Grid, client: int, fallback: str) -> str:
        """The first of the client's best sweep members; the common best for a client the judging split lacks."""
        first = self._measures.first
        found = self.metrics[first.name]
        known = {name: float(found[entries[client]]) for name, entries in grid.items() if client in entries}
        known = {name: value for name, value in known.items() if not np.isnan(value)}
        return first_best(known, first.mode) if known else fallback

    def undefined(self) -> list[str]:
        """For how many clients a metric is undefined although they have samples, and why: a sentence for each case."""
        found = []
        for metric in self._measures.metrics:
            for split, grid in self._grids.items():
                if not self._measures.measured_on(metric.name, split):
                    continue
                missing = max((self._missing(metric.name, list(e.values())) for e in grid.values()), key=len)
                if len(missing):
                    diverged = not np.isfinite(self.vectors[missing]).all()
                    why = DIVERGED if diverged else self._measures.undefined(metric.name)
                    found.append(
                        f"{metric.name} is undefined for {len(missing)} of {max(map(len, grid.values()))} clients on "
                        f"{split} data{f' ({why})' if why else ''}: it is null there, and means leave them out"
                    )
        return found

    def _row(
        self, split: str, model: str, judge: str, choice: str, entries: Sequence[int]
    ) -> tuple[dict[str, Any], Statistics]:
        pooled = Statistics(self.vectors[np.array(entries)].sum(axis=0), self._measures)
        row: dict[str, Any] = {"split": split, "model": model, "selected_on": judge, "choice": choice}
        row |= {"clients": len(entries), "n": pooled.n}
        together = pooled.metrics()
        for metric in (*METRICS, *(metric.name for metric in own_metrics(self._measures.metrics))):
            row |= dict.fromkeys((metric, f"{metric}_std", f"pooled_{metric}"))
            if metric not in self.metrics:
                continue
            # of all samples together it may be defined where it is for no client alone
            row[f"pooled_{metric}"] = defined(together[metric])
            values = self._defined(metric, entries)
            if not len(values):
                continue
            summary = summarize(values, mode=self._measures.first.mode)
            row |= {metric: summary.mean, f"{metric}_std": summary.std}
            if metric == self._measures.first.name:
                row |= {f"{metric}_worst5": summary.worst5, f"{metric}_jain": summary.jain}
        return row, pooled

    def _defined(self, metric: str, entries: Sequence[int]) -> np.ndarray:
        values = self._values(metric, entries)
        kept: np.ndarray = values[~np.isnan(values)]
        return kept

    def _missing(self, metric: str, entries: Sequence[int]) -> np.ndarray:
        """Returns those of the entries for which a metric is undefined."""
        kept: np.ndarray = np.array(entries)[np.isnan(self._values(metric, entries))]
        return kept

    def _values(self, metric: str, entries: Sequence[int]) -> np.ndarray:
        values: np.ndarray = self.metrics[metric][np.array(entries)]
        return values


def defined(value: float) -> float | None:
    """A metric's value as tables have it: null where it is undefined."""
    return None if np.isnan(value) else value
