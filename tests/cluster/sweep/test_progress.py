"""Lines of a sweep under way: an experiment's rounds now and then, and how it ended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from algorithms.registry import Experiment
from cluster.sweep.progress import SweepProgress
from cluster.sweep.trial import FAILURE, OBJECTIVE, ROUND
from rayfl.sweeps.measures import Measure
from rayfl.sweeps.space import parse_space
from rayfl.sweeps.trials import plan_sweep
from tests.support.experiments import small_experiment


def test_the_rounds_of_each_experiment_are_said_at_most_every_ten_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("cluster.sweep.progress.time.monotonic", lambda: now[0])
    sweep = plan_sweep(Experiment, small_experiment(tmp_path, "sweep", "fedavg"), parse_space(["seed=0:3"]), None, 0)
    first, second, before = sweep.trials
    said: list[str] = []
    failures: dict[str, str] = {}
    progress = SweepProgress(sweep, [first, second], Measure(), said.append, failures, None)
    for trial in (first, before):
        progress.started(trial)
    progress.reported(first, {ROUND: 1, OBJECTIVE: 0.5})
    progress.reported(second, {ROUND: 1})
    now[0] += 9
    progress.reported(first, {ROUND: 2, OBJECTIVE: 0.6})
    now[0] += 2
    progress.reported(first, {ROUND: 3, OBJECTIVE: 0.7})
    progress.reported(before, {ROUND: 3})
    progress.completed(first, {ROUND: 4, OBJECTIVE: 0.75})
    progress.completed(second, {ROUND: 2, FAILURE: "no luck"})
    assert [re.sub(r"^\d\d:\d\d:\d\d  ", "", line) for line in said] == [
        "starts: seed=0",
        "round 1/4  validation accuracy 50.00%: seed=0",
        "round 1/4: seed=1",
        "round 3/4  5.5 s a round  00:00:06 left  validation accuracy 70.00%: seed=0",
        "[1/2] seed=0: finished, validation accuracy 75.00%",
        "[2/2] seed=1: failed: no luck",
    ]
    assert failures == {second.name: "no luck"}
