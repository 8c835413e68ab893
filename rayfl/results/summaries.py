"""The scores of one evaluation as columns, and what they are over clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayfl.metrics import STATISTICS_SIZE, Statistics, first_best, metric_values, summarize
from rayfl.results.schemas import METRICS

Scores = Mapping[int, Mapping[str, Mapping[str, Statistics]]]
"""By client, split and model."""

Grid = dict[str, dict[int, int]]
"""By model and client, which entry."""


class ScoreTable:
    """The scores of one evaluation: an entry for each client, split and model, clients ascending.

    What has no samples is left out.

    Args:
        scores: what was found.

    Attributes:
        clients: the client of each entry.
        splits: its split.
        models: its model.
        vectors: its statistics, float64 of shape (entries, ``STATISTICS_SIZE``).
        metrics: its metrics by name, each float64 of shape (entries,).
    """

    def __init__(self, scores: Scores) -> None:
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
        self.vectors = np.array([entry[3] for entry in entries]).reshape(-1, STATISTICS_SIZE)
        self.metrics = metric_values(self.vectors)
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
        """Test rows of the sweep's best member: one for all clients, or one for each client."""
        grids = {
            split: {name: entries for name, entries in grid.items() if name.startswith(f"{sweep}=")}
            for split, grid in self._grids.items()
        }
        test = grids.get("test", {})
        rows = []
        for judge in ("validation", "test"):
            grid = grids.get(judge, {})
            if not test or not grid:
                continue
            means = {name: float(self._values("top1", list(entries.values())).mean()) for name, entries in grid.items()}
            best = first_best(means)
            rows.append(self._row("test", f"{sweep}=best", judge, best, list(test[best].values())))
            each = [test[self._best_of(grid, client, best)][client] for client in next(iter(test.values()))]
            rows.append(self._row("test", f"{sweep}=best", f"{judge} per client", "", each))
        return rows

    def _best_of(self, grid: Grid, client: int, fallback: str) -> str:
        """The first of the client's best sweep members; the common best for a client the judging split lacks."""
        top1 = self.metrics["top1"]
        known = {name: float(top1[entries[client]]) for name, entries in grid.items() if client in entries}
        return first_best(known) if known else fallback

    def _row(
        self, split: str, model: str, judge: str, choice: str, entries: Sequence[int]
    ) -> tuple[dict[str, Any], Statistics]:
        pooled = Statistics(self.vectors[np.array(entries)].sum(axis=0))
        row: dict[str, Any] = {"split": split, "model": model, "selected_on": judge, "choice": choice}
        row |= {"clients": len(entries), "n": pooled.n}
        for metric in METRICS:
            summary = summarize(self._values(metric, entries))
            row |= {metric: summary.mean, f"{metric}_std": summary.std, f"pooled_{metric}": getattr(pooled, metric)}
            if metric == "top1":
                row |= {"top1_worst5": summary.worst5, "top1_jain": summary.jain}
        return row, pooled

    def _values(self, metric: str, entries: Sequence[int]) -> np.ndarray:
        values: np.ndarray = self.metrics[metric][np.array(entries)]
        return values
