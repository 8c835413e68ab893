"""After any crash, the same command ends with the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import rayfl
from rayfl.errors import RunError
from rayfl.tracking.callback import RunInfo
from tests.support.experiments import assert_same, outcome, small_experiment

ROOT = Path(__file__).parents[3]


class ActorKiller(rayfl.Callback):
    """Kills an actor a moment after a round has ended, that is while the next one is being trained."""

    def __init__(self, after_round: int, delay_s: float, times: int = 1, host: int = 0) -> None:
        self._after_round = after_round
        self._delay_s = delay_s
        self._times = times
        self._host = host
        self._hosts: list[int] = []
        self.failures: list[int] = []

    def on_start(self, run: RunInfo) -> None:
        self._hosts = [int(host["pid"]) for host in run.hosts]

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        if rounds_completed == self._after_round and self._times:
            self._times -= 1
            threading.Thread(target=self._kill, args=(self._hosts[self._host],)).start()

    def on_failure(self, reason: str, rounds_completed: int) -> None:
        self.failures.append(rounds_completed)

    def _kill(self, pid: int) -> None:
        time.sleep(self._delay_s)
        os.kill(pid, signal.SIGKILL)


def long_rounds(config: dict[str, Any]) -> dict[str, Any]:
    """Rounds of some tenths of a second: an actor killed after one dies while it trains in the next."""
    return config | {"train": config["train"] | {"local_epochs": 60}}


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    ("delay_s", "method"),
    [
        pytest.param(0.0, "fedphp", marks=pytest.mark.slow),
        (0.05, "superfed-mm"),
        pytest.param(0.0, "superfed-mm", marks=pytest.mark.slow),
        pytest.param(0.05, "fedphp", marks=pytest.mark.slow),
    ],
)
def test_killed_actor(method: str, delay_s: float, tmp_path: Path) -> None:
    rayfl.run(long_rounds(small_experiment(tmp_path, "calm", method, backend="inline")))
    killer = ActorKiller(after_round=2, delay_s=delay_s)
    rayfl.run(long_rounds(small_experiment(tmp_path, "killed", method, num_actors=2)), callbacks=[killer])
    assert len(killer.failures) == 1
    assert killer.failures[0] in (0, 1, 2)
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "killed"))


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    "preset",
    [
        pytest.param("quickstart-regression", marks=pytest.mark.slow),
        pytest.param("quickstart-multilabel", marks=pytest.mark.slow),
        pytest.param("quickstart-text", marks=pytest.mark.slow),
        pytest.param("quickstart-tabular", marks=pytest.mark.slow),
        pytest.param("quickstart-segmentation", marks=pytest.mark.slow),
    ],
)
def test_killed_actor_of_another_task(preset: str, tmp_path: Path) -> None:
    options = {"train.rounds": 4, "train.local_epochs": 30, "evaluation.every": 2, "tracking.tensorboard": False}
    calm = {"name": "calm", "cluster.backend": "inline"}
    rayfl.run(preset, storage_path=str(tmp_path), **calm, **options)
    killer = ActorKiller(after_round=2, delay_s=0.05)
    killed = {"name": "killed", "cluster.num_actors": 2}
    rayfl.run(preset, callbacks=[killer], storage_path=str(tmp_path), **killed, **options)
    assert len(killer.failures) == 1
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "killed"))


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_too_many_failures_end_the_run_and_the_same_command_continues_it(tmp_path: Path) -> None:
    rayfl.run(long_rounds(small_experiment(tmp_path, "calm", "scaffold", backend="inline")))
    config = long_rounds(small_experiment(tmp_path, "killed", "scaffold", num_actors=1)) | {"max_failures": 0}
    with pytest.raises(RunError, match="max_failures=0"):
        rayfl.run(config, callbacks=[ActorKiller(after_round=2, delay_s=0.0)])
    rayfl.run(config)
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "killed"))


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_failures_with_commits_between_them_do_not_add_up(tmp_path: Path) -> None:
    config = long_rounds(small_experiment(tmp_path, "killed", "scaffold", num_actors=2)) | {"max_failures": 1}
    killers = [ActorKiller(after_round=1, delay_s=0.05), ActorKiller(after_round=3, delay_s=0.05, host=1)]
    rayfl.run(config, callbacks=killers)
    assert [len(killer.failures) for killer in killers] == [2, 2]
    rayfl.run(long_rounds(small_experiment(tmp_path, "calm", "scaffold", backend="inline")))
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "killed"))


def test_killed_driver_continues_without_ray(tmp_path: Path) -> None:
    rayfl.run(small_experiment(tmp_path, "calm", "superfed-mm", backend="inline"))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(small_experiment(tmp_path, "killed", "superfed-mm", num_actors=2)))
    killed = _start("tests/support/killed_run.py", str(config), "inside", "2")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    rayfl.run(small_experiment(tmp_path, "killed", "superfed-mm", backend="inline"))
    first, second = json.loads((tmp_path / "killed" / "environment.json").read_text())
    assert (first["rounds_completed"], second["rounds_completed"]) == (0, 1)
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "killed"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["superfed-mm", "floco", "fedphp"])
def test_killed_driver(method: str, tmp_path: Path) -> None:
    rayfl.run(small_experiment(tmp_path, "calm", method, backend="inline"))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(small_experiment(tmp_path, "killed", method, num_actors=2)))
    for moment, round in (("inside", 2), ("between", 3)):
        killed = _start("tests/support/killed_run.py", str(config), moment, str(round))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    finished = _start("-m", "rayfl", "run", str(config))
    assert finished.returncode == 0, finished.stderr
    assert "continues after round" in finished.stdout
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "killed"))


def _start(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
