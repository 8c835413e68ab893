"""What may listen to a run: progress, TensorBoard, anything a user adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayfl.config.schema import ExperimentConfig
from rayfl.metrics import CLASSIFICATION, Metric
from rayfl.results.summaries import Scores


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run when it starts.

    Attributes:
        config: the configuration.
        folder: the run's folder.
        num_clients: K.
        rounds_completed: 0, or where an interrupted run continues.
        hosts: one description per actor.
        plan: how many actors there are and why, in words.
        metrics: what the task is judged by; the first counts most.
        fingerprint: that the run's commits have: the configuration's, or an older one of the same experiment.
        promises: what the run promises about its clients and their samples (``privacy``), in words.
    """

    config: ExperimentConfig
    folder: str
    num_clients: int
    rounds_completed: int
    hosts: Sequence[Mapping[str, Any]]
    plan: Sequence[str] = ()
    fingerprint: str = ""
    metrics: Sequence[Metric] = CLASSIFICATION.metrics
    promises: Sequence[str] = ()


class Callback:
    """Base of all listeners; each method may be overridden. An exception from one ends the run.

    What a method returns is not used. Rows, costs and phases are each listener's own: it may change them.
    """

    def on_start(self, run: RunInfo) -> None:
        """The actors are up."""

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        """A round has been trained and aggregated."""

    def on_phases(self, rounds_completed: int, seconds: Mapping[str, float]) -> None:
        """How long a round's phases took.

        ``clients``: waiting for the clients' procedures; ``server``: the rest of the method's round; ``commit``:
        waiting for the commit of an earlier round; ``evaluation``: scoring models; ``simulated``: no part of the
        others, but the round on the virtual clock of a simulated system, where there is one.
        """

    def on_costs(self, rounds_completed: int, costs: Mapping[str, float]) -> None:
        """What a round took, before the listeners of its end hear of it.

        ``client_seconds``: of processors or GPUs in clients' procedures; ``peak_bytes``: the most memory that an
        actor has had; ``flops``: floating-point operations of local steps, with ``tracking.flops``.
        """

    def on_evaluation_progress(self, clients_done: int, clients: int) -> None:
        """``clients_done`` of the ``clients`` of an evaluation are scored."""

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """New summary rows, as in ``rounds.parquet``."""

    def on_scores(self, rounds_completed: int, cohort: str, phase: str, scores: Scores) -> None:
        """The clients' scores behind the summary rows that follow: statistics by client, split and model."""

    def on_commit(self, rounds_completed: int) -> None:
        """A commit is on storage."""

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        """An actor died; the run goes on from the commit of ``rounds_completed``."""

    def on_early_end(self, rounds_completed: int, why: str) -> None:
        """The run ends before its last round (``early_stopping``); ``why`` is a sentence."""

    def on_end(self, rounds_completed: int) -> None:
        """The run is over, finished or not; called exactly once after ``on_start``."""
