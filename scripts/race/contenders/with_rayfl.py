"""The race's works in rayfl.

The other contenders keep nothing on disk, so there is one commit, at the end; with the environment variable
``RAYFL_RACE_COMMITS`` there is one after every round, as is rayfl's default.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from work import LR, MOMENTUM, PROXIMAL_WEIGHT, Task, now

import rayfl
from rayfl.data.federated import FederatedDataset, OnDemand
from rayfl.examples import Examples, InputSpec
from rayfl.tracking.callback import Callback


class RaceData(FederatedDataset):
    """The clients of a work, read from its memory-mapped files."""

    def __init__(self, task: Task) -> None:
        self.task, work = task, task.work
        if work.model == "char_lstm":
            self.spec = InputSpec("tokens", work.shape, work.classes, vocabulary=work.classes)
        else:
            self.spec = InputSpec("image", work.shape, work.classes)
        self.names = tuple(str(client) for client in range(work.clients))

    @cached_property
    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: self.task.array(name) for name in ("x", "y", "x_test", "y_test")}

    def sizes(self) -> np.ndarray:
        return np.tile([self.task.work.samples, 0, self.task.work.test_samples], (len(self.names), 1))

    def load(self, client: int) -> Mapping[str, Examples]:
        def read(split: str) -> Examples:
            suffix = "_test" if split == "test" else ""
            x, y = (torch.from_numpy(self._arrays[n + suffix][client]) for n in ("x", "y"))
            return Examples(x[:0], y[:0]) if split == "validation" else Examples(x, y)

        return OnDemand(read)


def data(streams: Any) -> RaceData:
    """Named in the configuration; called in every process."""
    return RaceData(Task.read(os.environ["RAYFL_RACE"]))


class Clock(Callback):
    """When rounds end, and what the last evaluation says."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.evaluations: list[float] = []
        self.rows: list[Mapping[str, Any]] = []

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        self.ends.append(now())

    def on_phases(self, rounds_completed: int, seconds: Mapping[str, float]) -> None:
        self.evaluations.append(seconds["evaluation"])

    def on_evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows.extend(rows)


def configuration(task: Task) -> dict[str, Any]:
    """The work as a rayfl experiment."""
    work = task.work
    algorithm: dict[str, Any] = {"name": work.method}
    if work.method == "ditto":
        algorithm |= {"proximal_weight": PROXIMAL_WEIGHT, "personal_epochs": work.epochs}
    return {
        "name": "race",
        "storage_path": task.scratch,
        "dataset": {"name": "custom", "function": "with_rayfl:data"},
        "model": {"name": work.model},
        "algorithm": algorithm,
        "train": {
            "rounds": work.rounds,
            "clients_per_round": work.cohort,
            "local_epochs": work.epochs,
            "batch_size": work.batch,
            "lr": LR,
            "momentum": MOMENTUM,
        },
        # Evaluation at every round where it is what is timed, at the end otherwise.
        "evaluation": {"every": 1 if work.evaluate else work.rounds, "cohort_every": work.rounds, "splits": ["test"]},
        "tracking": {"tensorboard": False},
        "cluster": {"device": "cpu" if task.device == "cpu" else "cuda"},
        "storage": {"commit_every": 1 if "RAYFL_RACE_COMMITS" in os.environ else work.rounds},
    }


def main() -> None:
    task, clock = Task.read(sys.argv[-1]), Clock()
    os.environ["RAYFL_RACE"] = sys.argv[-1]
    rayfl.run(configuration(task), callbacks=[clock])
    model = "global" if task.work.method == "fedavg" else "personalized"
    phase = {"split": "test", "cohort": "selected" if model == "personalized" else "all", "model": model}
    last = [row for row in clock.rows if all(row[key] == value for key, value in phase.items())][-1]
    task.report(clock.ends, last["loss"], last["top1"], clock.evaluations[1:] if task.work.evaluate else [])


if __name__ == "__main__":
    main()
