"""The results of a run as Arrow tables: rows of clients, summaries, skipped clients and bins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rayfl.metrics import CLASSIFICATION, Measures, Statistics
from rayfl.results.appending import appended, joined, with_nulls, without_first
from rayfl.results.calibration import CALIBRATION_SCHEMA, bin_rows
from rayfl.results.contributions import CONTRIBUTIONS_SCHEMA
from rayfl.results.personalized import PersonalizedRows
from rayfl.results.schemas import (
    ADAPTERS_KEY,
    ADAPTIVE_KEY,
    CLIENTS_KEY,
    CLIP_NORM,
    COHORTS_SCHEMA,
    METHOD_KEY,
    METRICS,
    SKIPPED_SCHEMA,
    UNSEEN_KEY,
    data_metadata,
    metrics_metadata,
    own_metrics,
    schema_of,
)
from rayfl.results.summaries import Scores, ScoreTable, defined


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
        personalized: the row that is the method's personalized model, kept in the tables' metadata; None leaves it out.
        measures: of the task.
        simulated: whether devices are simulated.
        buffered: whether rounds have no barrier.
        method: the name that a user's own method gives itself, kept in the tables' metadata; empty leaves it out.
        adapters: whether adapters are trained, which have a product error.
        unseen: how many of the clients, the last ones, take no part in training.
        content: checksum of the source's samples, kept in the tables' metadata; None leaves it out.
        adaptive: whether the clipping norm moves.
        cohorts: rows so far; None where cohorts are not recorded.
        contributions: rows so far; None where clients are not valued.

    Attributes:
        committed: by table, how many rows there were before these.
        metadata: of all tables.
        simulated_s: the virtual time of new rows of ``rounds``, where they have it.
        staleness: of the round's updates by client, for new rows that have it.
        clip_norm: of the round, for new rows of ``rounds`` that have it.
        undefined: which metrics were undefined in evaluations, and why, a sentence each.
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
        personalized: str | None = None,
        measures: Measures = CLASSIFICATION,
        simulated: bool = False,
        buffered: bool = False,
        method: str = "",
        adapters: bool = False,
        unseen: int = 0,
        content: str | None = None,
        adaptive: bool = False,
        cohorts: pa.Table | None = None,
        contributions: pa.Table | None = None,
    ) -> None:
        self._names = names
        self._sweep = sweep
        self._partition, self._content = partition, content
        self._personalized, self._method = personalized, method
        self._measures, self._simulated, self._buffered = measures, simulated, buffered
        self._adapters, self._adaptive = adapters, adaptive
        self._unseen = unseen
        self._columns = (*METRICS, *(metric.name for metric in own_metrics(measures.metrics)))
        self.metadata = {**data_metadata(partition, content), CLIENTS_KEY: str(len(names) - unseen).encode()}
        if unseen:
            self.metadata[UNSEEN_KEY] = str(unseen).encode()
        if personalized is not None:
            self.metadata |= PersonalizedRows(personalized, sweep).metadata
        self.metadata |= metrics_metadata(measures.metrics)
        if method:
            self.metadata[METHOD_KEY] = method.encode()
        if adapters:
            self.metadata[ADAPTERS_KEY] = b"1"
        if adaptive:
            self.metadata[ADAPTIVE_KEY] = b"1"
        given = {"clients": clients, "rounds": rounds, "skipped": skipped, "calibration": calibration}
        optional = {"cohorts": cohorts, "contributions": contributions}
        given |= {name: table for name, table in optional.items() if table is not None}
        self.committed = {name: (committed or {}).get(name, 0) for name in given}
        schemas = {name: schema_of(name, measures.metrics, simulated, buffered, adapters, adaptive) for name in given}
        tables = {name: schemas[name].empty_table() if table is None else table for name, table in given.items()}
        tables = {name: table.replace_schema_metadata(self.metadata) for name, table in tables.items()}
        self.clients, self.rounds = tables["clients"], tables["rounds"]
        self.skipped, self.calibration = tables["skipped"], tables["calibration"]
        self.cohorts, self.contributions = tables.get("cohorts"), tables.get("contributions")
        self.simulated_s: float | None = None
        self.staleness: Mapping[int, int] = {}
        self.clip_norm: float | None = None
        self.undefined: dict[str, None] = {}

    def by_name(self) -> dict[str, pa.Table]:
        """All tables, by name."""
        return {name: getattr(self, name) for name in self.committed}

    def after(self, committed: Mapping[str, int]) -> ResultTables:
        """A collector for the rows that follow, which leaves this one as it is.

        Args:
            committed: by table, how many of its first rows are on storage: they are left out.
        """
        counts = {name: max(known, committed.get(name, 0)) for name, known in self.committed.items()}
        rest = {
            name: without_first(table, counts[name] - self.committed[name]) for name, table in self.by_name().items()
        }
        return ResultTables(
            self._names,
            self._sweep,
            self._partition,
            **rest,
            committed=counts,
            personalized=self._personalized,
            measures=self._measures,
            simulated=self._simulated,
            buffered=self._buffered,
            method=self._method,
            adapters=self._adapters,
            unseen=self._unseen,
            content=self._content,
            adaptive=self._adaptive,
        )

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
            self.skipped = appended(self.skipped, rows, SKIPPED_SCHEMA)

    def add_cohort(
        self, round: int, cohort: Sequence[int], losses: Mapping[int, float], repeats: Mapping[int, int]
    ) -> None:
        """Adds who took part in a round, where that is recorded.

        Args:
            round: completed rounds, this one included.
            cohort: clients, ascending.
            losses: of their training samples before the round, by client; of those that were asked.
            repeats: how often clients count in the means of the round, of those that count more than once.
        """
        if self.cohorts is not None and cohort:
            told = [(client, losses.get(client), repeats.get(client, 1)) for client in cohort]
            rows = [{"round": round, "client": client, "loss": loss, "count": count} for client, loss, count in told]
            self.cohorts = appended(self.cohorts, rows, COHORTS_SCHEMA)

    def add_contributions(self, rows: list[dict[str, Any]]) -> None:
        """Adds rows of ``rayfl.results.contributions.rows_of_round``."""
        self.contributions = appended(self.contributions, rows, CONTRIBUTIONS_SCHEMA)

    def add(
        self,
        round: int,
        cohort: str,
        phase: str,
        scores: Scores,
        traffic: tuple[int, int],
        messages: Mapping[int, tuple[int, int]] | None = None,
        update_variance: float | None = None,
        product_error: float | None = None,
    ) -> list[dict[str, Any]]:
        """Adds the rows of one evaluation; returns the summary rows.

        Args:
            round: completed rounds.
            cohort: ``all``, ``selected`` or ``unseen``.
            phase: ``received`` or ``trained``.
            scores: statistics by client, split and model.
            traffic: bytes sent down and up since the start.
            messages: bytes down and up in this round, by client.
            update_variance: of the cohort's updates.
            product_error: of the cohort's adapters.
        """
        found = ScoreTable(scores, self._measures)
        if not len(found):
            return []
        if cohort != "selected":
            self.undefined |= dict.fromkeys(found.undefined())
        self._append_clients(found, (round, cohort, phase), messages or {})
        key = {"round": round, "cohort": cohort, "phase": phase}
        down, up = traffic
        key |= {"bytes_down": down, "bytes_up": up, "update_variance": update_variance}
        key |= {"product_error": product_error} if self._adapters else {}
        pairs = [({**key, **summary}, pooled) for summary, pooled in found.summaries(self._sweep)]
        summaries = [summary for summary, _ in pairs]
        self._append_rounds(summaries)
        if cohort != "selected":
            bins = [row for pair in pairs for row in bin_rows(*pair)]
            self.calibration = appended(self.calibration, bins, CALIBRATION_SCHEMA)
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
        rows = []
        for model, statistics in scores.items():
            values = {metric: defined(value) for metric, value in statistics.metrics().items()}
            rows.append(
                {
                    **dict.fromkeys(self.rounds.schema.names),
                    **key,
                    "model": model,
                    "selected_on": "",
                    "choice": "",
                    "clients": 0,
                    "n": statistics.n,
                    **values,
                    **{f"pooled_{metric}": value for metric, value in values.items()},
                    **dict(zip(("bytes_down", "bytes_up"), traffic, strict=True)),
                }
            )
        self._append_rounds(rows)
        return rows

    def _append_clients(
        self, found: ScoreTable, key: tuple[int, str, str], messages: Mapping[int, tuple[int, int]]
    ) -> None:
        count, (round, cohort, phase) = len(found), key
        both = [messages.get(client, (None, None)) for client in found.clients]
        columns = {
            "client": found.clients,
            "name": [self._names[client] for client in found.clients],
            "round": [round] * count,
            "split": found.splits,
            "cohort": [cohort] * count,
            "phase": [phase] * count,
            "model": found.models,
            "n": found.vectors[:, 0].astype(np.int64),
            **{metric: with_nulls(found.metrics.get(metric), count) for metric in self._columns},
            "bytes_down": [down for down, _ in both],
            "bytes_up": [up for _, up in both],
        }
        if "staleness" in self.clients.schema.names:
            found_in = self.staleness if cohort == "selected" else {}
            columns["staleness"] = [found_in.get(client) for client in found.clients]
        self.clients = joined(self.clients, pa.table(columns, schema=self.clients.schema))

    def _append_rounds(self, rows: list[dict[str, Any]]) -> None:
        if "simulated_s" in self.rounds.schema.names:
            for row in rows:
                row["simulated_s"] = self.simulated_s
        if self._adaptive:
            for row in rows:
                row[CLIP_NORM] = self.clip_norm
        if "staleness" in self.rounds.schema.names and self.staleness:
            each = list(self.staleness.values())
            for row in rows:
                row |= {"staleness": sum(each) / len(each), "staleness_max": max(each)}
        self.rounds = appended(self.rounds, rows, self.rounds.schema)
