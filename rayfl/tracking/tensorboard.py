"""TensorBoard: curves by split, model and metric, histograms over clients, hyper-parameters, and the lambda curve."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayfl.config.schema import ExperimentConfig
from rayfl.metrics import CLASSIFICATION, Metric
from rayfl.results.summaries import Scores
from rayfl.tracking.callback import Callback, RunInfo
from rayfl.tracking.plain_text import PLAIN_TEXT
from rayfl.tracking.scalars import Overview, hyper_parameters, scalars

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Callback):
    """Writes event files into the run's folder.

    Args:
        folder: the run's folder on a disk.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._config: ExperimentConfig | None = None
        self._first = CLASSIFICATION.first
        self._chosen: Overview | None = None
        self._newest: Sequence[Mapping[str, Any]] = ()
        self._others: set[Any] = set()
        self._threads: set[Any] | None = None
        self._hook = threading.excepthook
        self._ended_early = False

    def on_start(self, run: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter  # half a second that only runs pay

        self._config, self._first = run.config, run.metrics[0]
        if run.config.tracking.tensorboard_scalars == "overview":
            self._chosen = Overview.of(run.config, self._first.name)
        self._others |= set(threading.enumerate())
        self._hook, threading.excepthook = threading.excepthook, self._quietly
        # What an interrupted run wrote after its last commit is hidden, not shown twice.
        self._writer = SummaryWriter(str(self._folder), purge_step=run.rounds_completed + 1)
        self._threads = {*threading.enumerate()} - self._others

    def _quietly(self, failed: threading.ExceptHookArgs) -> None:
        """Prints no traceback of the writer's own thread: the next call raises its error again."""
        if failed.thread in self._others or (self._threads is not None and failed.thread not in self._threads):
            self._hook(failed)

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._writer is not None
        for name, value in scalars(rows, self._chosen).items():
            self._writer.add_scalar(name, value, rows[0]["round"])
        if any(row["cohort"] == "all" for row in rows):
            self._newest = rows

    def on_scores(self, rounds_completed: int, cohort: str, phase: str, scores: Scores) -> None:
        assert self._writer is not None
        if cohort != "all":
            return
        values: dict[str, list[float]] = {}
        for splits in scores.values():
            for split, models in splits.items():
                for model, statistics in models.items():
                    if self._chosen is not None and model not in (self._chosen.model, "global"):
                        continue
                    if statistics.n and not np.isnan(statistics.first):
                        values.setdefault(f"{split}/{model}", []).append(statistics.first)
        for name, found in values.items():
            self._writer.add_histogram(f"{self._first.name} over clients, {name}", np.array(found), rounds_completed)

    def on_phases(self, rounds_completed: int, seconds: Mapping[str, float]) -> None:
        assert self._writer is not None
        for phase, value in seconds.items():
            self._writer.add_scalar(f"time/{phase}", value, rounds_completed)

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        assert self._writer is not None
        self._writer.add_scalar("time/seconds per round", seconds, rounds_completed)
        self._writer.add_scalar("time/clients per second", len(cohort) / seconds, rounds_completed)

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        assert self._writer is not None
        self._writer.add_text("failures", reason, rounds_completed)

    def on_early_end(self, rounds_completed: int, why: str) -> None:
        assert self._writer is not None
        self._ended_early = True
        self._writer.add_text("early stopping", why, rounds_completed)

    def on_end(self, rounds_completed: int) -> None:
        try:
            if self._writer is None:
                return
            over = self._config is not None and (self._ended_early or rounds_completed == self._config.train.rounds)
            if self._config is not None and over and self._newest:
                self._finish(self._writer, self._config, rounds_completed)
            self._writer.close()
        finally:
            threading.excepthook = self._hook

    def _finish(self, writer: SummaryWriter, config: ExperimentConfig, rounds: int) -> None:
        test = [row for row in self._newest if row["split"] == "test"]
        last = {self._first.name, "loss", "ece"}
        final = {name: value for name, value in scalars(test, self._chosen).items() if name.partition("/")[0] in last}
        writer.add_hparams(
            hyper_parameters(config), {f"final {name}": value for name, value in final.items()}, None, "."
        )
        sweep = config.algorithm.sweep
        line = [row for row in test if row["model"].startswith(f"{sweep}=") and not row["selected_on"]]
        if len(line) > 1:
            import matplotlib

            with matplotlib.rc_context(PLAIN_TEXT):
                writer.add_figure(f"{self._first.label} along {sweep}", sweep_figure(sweep, line, self._first), rounds)


def sweep_figure(sweep: str, rows: Sequence[Mapping[str, Any]], metric: Metric) -> Figure:
    """The task's first metric against the swept value: mean over clients, with a band of one standard deviation."""
    from matplotlib.figure import Figure

    name = metric.name
    points = sorted((float(row["model"].partition("=")[2]), row[name], row[f"{name}_std"]) for row in rows)
    place, mean, std = (np.array(column) for column in zip(*points, strict=True))
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(place, mean, marker="o")
    axes.fill_between(place, mean - std, mean + std, alpha=0.2)
    axes.set(xlabel=sweep, ylabel=f"{metric.label}, test", title="mean and standard deviation over clients")
    return figure
