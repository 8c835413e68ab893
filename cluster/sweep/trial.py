"""One experiment of a sweep, in a process that Ray Tune starts: runs it and reports what it has committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.hosting.building import automatic_memory
from algorithms.registry import Experiment
from cluster.run import inline_device, run_config
from rayfl.config.cluster_section import ClusterConfig
from rayfl.config.loading import load_config
from rayfl.errors import RayflError
from rayfl.sweeps.measures import Measure, evaluations
from rayfl.tracking.callback import Callback

ROUND, OBJECTIVE, FAILURE = "round", "objective", "failure"
"""Keys of a report: completed rounds, the objective of the newest evaluation, the reason of a failure."""

Report = Callable[[dict[str, Any]], None]


class CommitReporter(Callback):
    """Reports every commit, so that a scheduler sees, and stops after, only rounds that are on storage.

    Args:
        measure: number that experiments are compared by.
        algorithm: method of the experiment.
        report: sends a report.

    Attributes:
        reported: completed rounds of the last report.
    """

    def __init__(self, measure: Measure, algorithm: Any, report: Report) -> None:
        self._measure = measure
        self._algorithm = algorithm
        self._report = report
        self._waiting: list[Mapping[str, Any]] = []
        self.reported = 0

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._waiting += [row for row in rows if row["cohort"] == "all"]

    def on_commit(self, rounds_completed: int) -> None:
        committed = [row for row in self._waiting if row["round"] <= rounds_completed]
        self._waiting = [row for row in self._waiting if row["round"] > rounds_completed]
        for line in history(committed, self._measure, self._algorithm):
            if line[ROUND] < rounds_completed:
                self._report(line)
        newest = history([row for row in committed if row["round"] == rounds_completed], self._measure, self._algorithm)
        self.reported = rounds_completed
        self._report(newest[0] if newest else {ROUND: rounds_completed})


def history(rows: Sequence[Mapping[str, Any]], measure: Measure, algorithm: Any) -> list[dict[str, Any]]:
    """Returns one report for each evaluation of all clients, by round."""
    values = {round: measure.value(found, algorithm) for round, found in sorted(evaluations(rows).items())}
    return [{ROUND: round, OBJECTIVE: value} for round, value in values.items() if value is not None]


def run_trial(
    content: Mapping[str, Any], measure: Measure, before: Sequence[Mapping[str, Any]], neighbours: int, report: Report
) -> None:
    """Runs one experiment to its end, or continues it.

    Args:
        content: configuration as plain data.
        measure: number that experiments are compared by.
        before: reports of an earlier attempt, which are sent to the scheduler again.
        neighbours: number of experiments that share a machine's memory, this one included.
        report: sends a report with the keys :data:`ROUND`, :data:`OBJECTIVE` and :data:`FAILURE`.
    """
    for line in before:
        report(dict(line))
    config = load_config(Experiment, content, {})
    config = config.model_copy(update={"cluster": with_memory_of_trial(config.cluster, neighbours)})
    progress = CommitReporter(measure, config.algorithm, report)
    try:
        # An earlier attempt may have left its lease on another machine, and nobody would try again.
        result = run_config(config, [progress], waits=True)
        if progress.reported < result.rounds_completed:
            report({ROUND: result.rounds_completed})
    except RayflError as error:
        report({ROUND: 0, FAILURE: str(error)})
    except Exception as error:  # Ray Tune would take it for the death of the process, and try again
        report({ROUND: 0, FAILURE: f"{type(error).__name__}: {error}"})


def with_memory_of_trial(cluster: ClusterConfig, neighbours: int) -> ClusterConfig:
    """Returns the cluster section with this experiment's part of the machine's memory."""
    on_gpu = cluster.backend == "inline" and inline_device(cluster.device) == "cuda"
    shares = {
        field: automatic_memory(field, neighbours)
        for field in (("state_memory",) if on_gpu else ("state_memory", "data_memory"))
        if cluster.backend == "inline" and getattr(cluster, field) == "auto"
    }
    return cluster.model_copy(update=shares)
