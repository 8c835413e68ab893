"""What a finished run gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from rayfl.config.schema import ExperimentConfig
from rayfl.errors import RunError
from rayfl.experiment.client_privacy import client_epsilon
from rayfl.experiment.example_privacy import example_epsilons
from rayfl.randomness import RandomStreams
from rayfl.results.contributions import CONTRIBUTIONS_SCHEMA
from rayfl.results.personalized import PersonalizedRows, recorded_clients
from rayfl.results.schemas import DAMAGE_SCHEMA, SKIPPED_SCHEMA, metrics_of


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Attributes:
        path: the run's folder.
        config: the resolved configuration.
        rounds: summaries over clients, schema ``rayfl.results.schemas.ROUNDS_SCHEMA``.
        clients: one row per client, schema ``rayfl.results.schemas.CLIENTS_SCHEMA``.
        rounds_completed: rounds done.
        ended_early: whether the run ended before its last round (``early_stopping``).
        samples: training samples of each client that may train.
        summed: numbers of a client's message at most, where epsilon depends on it; else 0.
        contributions: what clients have contributed, schema
            ``rayfl.results.contributions.CONTRIBUTIONS_SCHEMA``; empty without the section ``contribution``.
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
    ended_early: bool = False
    samples: tuple[int, ...] = ()
    contributions: pa.Table = field(default_factory=CONTRIBUTIONS_SCHEMA.empty_table)
    summed: int = 0

    @property
    def epsilon(self) -> float | None:
        """Returns epsilon of user-level differential privacy after the rounds done; None without noise.

        Where each client adds noise, it is that of the client that was in the most rounds.

        Raises:
            ImportError: opacus is not installed.
        """
        clients = recorded_clients(self.rounds)
        if not self.config.privacy.noise_multiplier or clients is None:
            return None
        return client_epsilon(self.config, clients, self.summed, self.rounds_completed)

    @property
    def example_epsilons(self) -> list[float] | None:
        """Returns epsilon of the privacy of samples after the rounds done, by client; None without noise.

        Raises:
            ImportError: opacus is not installed.
        """
        if not self.config.privacy.example_noise_multiplier:
            return None
        return example_epsilons(self.config, self.samples, self.rounds_completed, planned=False)

    @property
    def malicious(self) -> frozenset[int]:
        """Returns the ids of the malicious clients (``attack``), which are in no score."""
        clients = recorded_clients(self.rounds)
        return (
            frozenset() if clients is None else self.config.attack.attackers(clients, RandomStreams(self.config.seed))
        )

    def score(self, metric: str | None = None) -> float:
        """The personalized model's mean of a metric over all clients, on test data after the last evaluation.

        Of a method that sweeps, that is the model chosen on validation data.

        Args:
            metric: a column of ``rounds``, such as ``top1_worst5`` or ``loss``; the task's first metric if left out.

        Raises:
            RunError: there is no such column or row; says which there are.
        """
        name = metric or metrics_of(self.rounds)[0].name
        numbers = [field.name for field in self.rounds.schema if not pa.types.is_string(field.type)]
        if name not in numbers:
            raise RunError(f"{self.path}: there is no metric {name!r}; there are {', '.join(numbers)}")
        own = PersonalizedRows.recorded(self.rounds) or PersonalizedRows.of(self.config.algorithm)
        rows = [
            row
            for row in self.rounds.to_pylist()
            if (row["split"], row["cohort"], row["phase"]) == ("test", "all", "received") and own.is_summary(row)
        ]
        if not rows or rows[-1][name] is None:
            raise RunError(
                f"{self.path}: no evaluation has {name} of {own.label} on test data"
                + ("" if own.sweep is None else ", chosen on validation data (evaluation.splits, holdout.validation)")
            )
        return float(max(rows, key=lambda row: row["round"])[name])
