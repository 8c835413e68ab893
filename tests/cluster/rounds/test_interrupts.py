"""Ctrl-C and SIGTERM lose nothing: once after the round, twice at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import ray
import yaml

import rayfl
from cluster.rounds.interrupts import Interrupted, StopRequest, Terminated, stop_requests
from rayfl.errors import StopSignal
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.support.experiments import assert_same, outcome, small_experiment

ROOT = Path(__file__).parents[3]


class Signals(rayfl.Callback):
    """Sends signals to this process after a round, as somebody outside would during the next."""

    def __init__(self, after: int, numbers: Sequence[int]) -> None:
        self._after = after
        self._numbers = numbers
        self.committed = 0

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        if rounds_completed == self._after:
            for number in self._numbers:
                os.kill(os.getpid(), number)

    def on_commit(self, rounds_completed: int) -> None:
        self.committed = rounds_completed


def committed(folder: Path) -> int:
    manifest = CommitStore(Storage(str(folder))).latest()
    return manifest.rounds_completed if manifest is not None else 0


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
@pytest.mark.first_case
def test_a_signal_ends_the_run_after_its_round_with_everything_committed(
    number: int, error: type[BaseException], tmp_path: Path
) -> None:
    rayfl.run(small_experiment(tmp_path, "whole", "scaffold", backend="inline"))
    # Every fourth round would be committed: without the signal there would be nothing yet.
    config = small_experiment(tmp_path, "pieces", "scaffold", backend="inline") | {"storage": {"commit_every": 4}}
    handlers = [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    listener = Signals(after=2, numbers=[number])
    with pytest.raises(error) as stop:
        rayfl.run(config, callbacks=[listener])
    assert listener.committed == committed(tmp_path / "pieces") == 2
    assert [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)] == handlers
    assert isinstance(stop.value, StopSignal)
    if isinstance(stop.value, SystemExit):
        assert stop.value.code == 143
    rayfl.run(config)
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))


def test_the_second_signal_stops_at_once(tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "pieces", "fedavg", backend="inline") | {"storage": {"commit_every": 4}}
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(config, callbacks=[Signals(after=2, numbers=[signal.SIGINT, signal.SIGINT])])
    assert committed(tmp_path / "pieces") == 0


def train(seconds: float, number: int, patient: bool) -> StopRequest:
    """A round of some seconds, in which a signal arrives."""
    with stop_requests(grace_s=0.05) as stop:
        stop.patient = patient
        os.kill(os.getpid(), number)
        time.sleep(seconds)
    return stop


def test_a_round_that_outlasts_the_grace_is_abandoned() -> None:
    with pytest.raises(Terminated):
        train(10, signal.SIGTERM, patient=True)
    assert train(0, signal.SIGTERM, patient=True).requested


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, Interrupted), (signal.SIGTERM, Terminated)])
def test_the_error_is_that_of_the_signal_where_ray_waits_too(number: int, error: type[BaseException]) -> None:
    nowhere = ray.remote(lambda: None).options(num_cpus=10**6).remote()
    later = threading.Timer(0.1, os.kill, (os.getpid(), number))

    def waits() -> None:
        with stop_requests(grace_s=60):
            later.start()
            ray.wait([nowhere], timeout=10)

    with pytest.raises(error):
        waits()


def test_a_round_that_ends_in_time_is_not_hurried() -> None:
    with stop_requests(grace_s=0.05) as stop:
        stop.patient = True
        os.kill(os.getpid(), signal.SIGTERM)
        stop.settle()
        time.sleep(0.1)
        assert stop.requested


def test_before_the_first_round_the_first_signal_stops_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        train(10, signal.SIGINT, patient=False)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    found: list[StopRequest] = []

    def other() -> None:
        with stop_requests(grace_s=1) as stop:
            found.append(stop)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert not found[0].requested
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_under_ray_stops_between_two_rounds(number: int, status: int, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    content = small_experiment(tmp_path, "run", "fedavg", num_actors=1)
    content |= {"train": content["train"] | {"rounds": 5000}, "storage": {"commit_every": 1000}}
    config.write_text(yaml.safe_dump(content))
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    started = subprocess.Popen(
        [sys.executable, "-m", "rayfl", "run", str(config)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    log = tmp_path / "run" / "rayfl.log"
    while started.poll() is None and not (log.exists() and "round " in log.read_text()):
        time.sleep(0.1)
    # To the whole group, as a terminal does for Ctrl-C: Ray's own processes must survive it.
    os.killpg(started.pid, number) if number == signal.SIGINT else started.send_signal(number)
    _, errors = started.communicate(timeout=120)
    assert started.returncode == status, errors
    assert "after this round" in errors
    assert "the same command continues" in errors
    assert "Traceback" not in errors and "SIGTERM handler" not in errors and "*** " not in errors, errors
    assert committed(tmp_path / "run") >= 2
    assert (tmp_path / "run" / "rounds.parquet").exists()
    assert "died" not in log.read_text()
