"""The results of a run as Arrow tables: rows of clients, summaries, skipped clients and bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rayfl.calibration import CALIBRATION_SCHEMA, bin_rows
from rayfl.metrics import Statistics, summarize
from rayfl.table_schemas import CLIENTS_SCHEMA, METRICS, PARTITION_KEY, ROUNDS_SCHEMA, SKIPPED_SCHEMA, TABLES

_MOST_CHUNKS = 64

Scores = Mapping[int, Mapping[str, Mapping[str, Statistics]]]


class ResultTables:
    """Collects the rows of a run.

    Args:
        names: the clients' names.
        sweep: prefix of the rows among which one is chosen (``lambda``), or None.
        partition: hash of who owns which sample, kept in the tables' metadata.
        clients: rows so far.
        rounds: rows so far.
        skipped: rows so far.
        calibration: rows so far.
        committed: by table, how many rows there were before these, which are on storage.

    Attributes:
        committed: by table, how many rows there were before these.
        simulated_s: the virtual time of new rows of ``rounds``, where they have it.
    """

    def __init__(
        self,
        names: Sequence[str],
        sweep: str | None,
        partition: str = "",
        clients: pa.Table | None = None,
        rounds: pa.Table | None = None,
        skipped: pa.Table | None = None,
        calibration: pa.Table | None = None,
        committed: Mapping[str, int] | None = None,
    ) -> None:
        self.committed = {name: (committed or {}).get(name, 0) for name in TABLES}
        self._names = names
        self._sweep = sweep
        self._partition = partition
        metadata = {PARTITION_KEY: partition.encode()}
        given = {"clients": clients, "rounds": rounds, "skipped": skipped, "calibration": calibration}
        tables = {name: TABLES[name].empty_table() if table is None else table for name, table in given.items()}
        tables = {name: table.replace_schema_metadata(metadata) for name, table in tables.items()}
        self.clients, self.rounds = tables["clients"], tables["rounds"]
        self.skipped, self.calibration = tables["skipped"], tables["calibration"]
        self.simulated_s: float | None = None

    def by_name(self) -> dict[str, pa.Table]:
        """All tables, by name."""
        return {
            "clients": self.clients,
            "rounds": self.rounds,
            "skipped": self.skipped,
            "calibration": self.calibration,
        }

    def after(self, committed: Mapping[str, int]) -> ResultTables:
        """A collector for the rows that follow, which leaves this one as it is.

        Args:
            committed: by table, how many of its first rows are on storage: they are left out.
        """
        counts = {name: max(known, committed.get(name, 0)) for name, known in self.committed.items()}
        rest = {name: _without(table, counts[name] - self.committed[name]) for name, table in self.by_name().items()}
        return ResultTables(self._names, self._sweep, self._partition, **rest, committed=counts)

    def add_skipped(self, round: int, failures: Mapping[int, tuple[str, str]]) -> None:
        """Adds the clients that were left out.

        Args:
            round: completed rounds, the one without them included.
            failures: procedure and reason, by client.
        """
        rows = [
            {"round": round, "client": client, "name": self._names[client], "procedure": procedure, "reason": reason}
            for client, (procedure, reason) in sorted(failures.items())
        ]
        if rows:
            self.skipped = _append(self.skipped, rows, SKIPPED_SCHEMA)

    def add(
        self,
        round: int,
        cohort: str,
        phase: str,
        scores: Scores,
        traffic: tuple[int, int],
        messages: Mapping[int, tuple[int, int]] | None = None,
        update_variance: float | None = None,
    ) -> list[dict[str, Any]]:
        """Adds the rows of one evaluation; returns the summary rows.

        Args:
            round: completed rounds.
            cohort: ``all`` or ``selected``.
            phase: ``received`` or ``trained``.
            scores: statistics by client, split and model.
            traffic: bytes sent down and up since the start.
            messages: bytes down and up in this round, by client.
            update_variance: of the cohort's updates.
        """
        nothing = (None, None)
        rows = [
            {
                "client": client,
                "name": self._names[client],
                "round": round,
                "split": split,
                "cohort": cohort,
                "phase": phase,
                "model": model,
                "n": statistics.n,
                **{metric: getattr(statistics, metric) for metric in METRICS},
                **dict(zip(("bytes_down", "bytes_up"), (messages or {}).get(client, nothing), strict=True)),
            }
            for client in sorted(scores)
            for split, models in scores[client].items()
            for model, statistics in models.items()
            if statistics.n
        ]
        if not rows:
            return []
        self.clients = _append(self.clients, rows, CLIENTS_SCHEMA)
        key = {"round": round, "cohort": cohort, "phase": phase}
        down, up = traffic
        summaries = [
            {**key, "bytes_down": down, "bytes_up": up, "update_variance": update_variance, **summary}
            for summary in self._summaries(_by_split(scores))
        ]
        pooled = [summary.pop("pooled") for summary in summaries]
        self._append_rounds(summaries)
        if cohort == "all":
            bins = [row for pair in zip(summaries, pooled, strict=True) for row in bin_rows(*pair)]
            self.calibration = _append(self.calibration, bins, CALIBRATION_SCHEMA)
        return summaries

    def add_official(
        self, round: int, scores: Mapping[str, Statistics], traffic: tuple[int, int]
    ) -> list[dict[str, Any]]:
        """Adds the rows of the server's own models on the official test part; returns them.

        Args:
            round: completed rounds.
            scores: statistics by model.
            traffic: bytes sent down and up since the start.
        """
        key = {"round": round, "split": "official", "cohort": "server", "phase": "received"}
        rows = [
            {
                **dict.fromkeys(ROUNDS_SCHEMA.names),
                **key,
                "model": model,
                "selected_on": "",
                "choice": "",
                "clients": 0,
                "n": statistics.n,
                **{metric: getattr(statistics, metric) for metric in METRICS},
                **{f"pooled_{metric}": getattr(statistics, metric) for metric in METRICS},
                **dict(zip(("bytes_down", "bytes_up"), traffic, strict=True)),
            }
            for model, statistics in scores.items()
        ]
        self._append_rounds(rows)
        return rows

    def _append_rounds(self, rows: list[dict[str, Any]]) -> None:
        if "simulated_s" in self.rounds.schema.names:
            for row in rows:
                row["simulated_s"] = self.simulated_s
        self.rounds = _append(self.rounds, rows, self.rounds.schema)

    def _summaries(self, by_split: Mapping[str, Mapping[str, dict[int, Statistics]]]) -> list[dict[str, Any]]:
        rows = [
            {"split": split, "model": model, "selected_on": "", "choice": "", **_summary(list(clients.values()))}
            for split, models in by_split.items()
            for model, clients in models.items()
        ]
        return rows + (self._chosen(by_split) if self._sweep is not None else [])

    def _chosen(self, by_split: Mapping[str, Mapping[str, dict[int, Statistics]]]) -> list[dict[str, Any]]:
        """Test rows of the sweep's best member: one for all clients, or one for each client."""
        grids = {
            split: {name: clients for name, clients in models.items() if name.startswith(f"{self._sweep}=")}
            for split, models in by_split.items()
        }
        test = grids.get("test", {})
        rows = []
        for judge in ("validation", "test"):
            grid = grids.get(judge, {})
            if not test or not grid:
                continue
            best = max(grid, key=lambda name, grid=grid: _mean_top1(grid[name].values()))  # type: ignore[misc]
            rows.append(self._choice(judge, best, list(test[best].values())))
            each = {client: _best_of(grid, client, best) for client in next(iter(test.values()))}
            rows.append(self._choice(f"{judge} per client", "", [test[name][client] for client, name in each.items()]))
        return rows

    def _choice(self, judge: str, choice: str, statistics: list[Statistics]) -> dict[str, Any]:
        row = {"split": "test", "model": f"{self._sweep}=best", "selected_on": judge, "choice": choice}
        return {**row, **_summary(statistics)}


def _without(table: pa.Table, rows: int) -> pa.Table:
    """The table without its first rows (or as many as it has), and without their memory, as a slice would be."""
    return table.take(np.arange(rows, table.num_rows)) if rows and table.num_rows else table


def _append(table: pa.Table, rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    grown = pa.Table.from_pylist(rows, schema=schema).replace_schema_metadata(table.schema.metadata)
    longer = pa.concat_tables([table, grown])
    # Every chunk costs a kilobyte a column, whatever is in it, and time with every commit.
    return longer if longer.column(0).num_chunks <= _MOST_CHUNKS else longer.combine_chunks()


def _by_split(scores: Scores) -> dict[str, dict[str, dict[int, Statistics]]]:
    """Scores by split, model and client (ascending), without empty splits."""
    result: dict[str, dict[str, dict[int, Statistics]]] = {}
    for client in sorted(scores):
        for split, models in scores[client].items():
            for model, statistics in models.items():
                if statistics.n:
                    result.setdefault(split, {}).setdefault(model, {})[client] = statistics
    return result


def _summary(statistics: list[Statistics]) -> dict[str, Any]:
    pooled = sum(statistics, Statistics.empty())
    row: dict[str, Any] = {"clients": len(statistics), "n": pooled.n, "pooled": pooled}
    for metric in METRICS:
        summary = summarize(np.array([getattr(s, metric) for s in statistics]))
        row |= {metric: summary.mean, f"{metric}_std": summary.std, f"pooled_{metric}": getattr(pooled, metric)}
        if metric == "top1":
            row |= {"top1_worst5": summary.worst5, "top1_jain": summary.jain}
    return row


def _mean_top1(statistics: Any) -> float:
    return float(np.mean([s.top1 for s in statistics]))


def _best_of(grid: Mapping[str, dict[int, Statistics]], client: int, fallback: str) -> str:
    """The first of the client's best sweep members; the common best for a client the judging split lacks."""
    known = [name for name, clients in grid.items() if client in clients]
    return max(known, key=lambda name: grid[name][client].top1) if known else fallback
