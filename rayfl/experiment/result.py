"""What a finished run gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from rayfl.config.schema import ExperimentConfig
from rayfl.results.schemas import DAMAGE_SCHEMA, SKIPPED_SCHEMA


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Attributes:
        path: the run's folder.
        config: the resolved configuration.
        rounds: summaries over clients, schema ``rayfl.results.schemas.ROUNDS_SCHEMA``.
        clients: one row per client, schema ``rayfl.results.schemas.CLIENTS_SCHEMA``.
        rounds_completed: rounds done.
        partition: SHA-256 of who owns which sample (``partition.parquet`` in the folder).
        skipped: clients that failed and were left out, schema ``rayfl.results.tables.SKIPPED_SCHEMA``.
        damage: what damage to files has cost the run, schema ``rayfl.results.tables.DAMAGE_SCHEMA``; empty if nothing.
    """

    path: str
    config: ExperimentConfig
    rounds: pa.Table
    clients: pa.Table
    rounds_completed: int
    partition: str = ""
    skipped: pa.Table = field(default_factory=SKIPPED_SCHEMA.empty_table)
    damage: pa.Table = field(default_factory=DAMAGE_SCHEMA.empty_table)
