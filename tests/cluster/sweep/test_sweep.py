"""Sweeps on a real Ray Tune."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

import rayfl
from algorithms.registry import Experiment
from cluster.sweep.folder import STOPPED_FILE, write_record
from cluster.sweep.run import SweepOptions, SweepResult, run_sweep
from rayfl.config.loading import to_yaml
from rayfl.errors import ConfigError, RunError
from rayfl.storage.lease import Lease
from rayfl.sweeps.measures import Measure
from rayfl.sweeps.space import parse_space
from rayfl.sweeps.trials import Sweep, plan_sweep
from tests.support.experiments import assert_same, outcome, small_experiment
from tests.support.transcripts import FOLDER, play

pytest.importorskip("ray.tune", reason="Ray Tune is not installed: pip install 'ray[tune]'", exc_type=ImportError)


def plan(folder: Path, *overrides: str, **cluster: Any) -> Sweep:
    content = small_experiment(folder, "sweep", "fedavg", **cluster)
    return plan_sweep(Experiment, content, parse_space(overrides), None, 0)


def sweep(
    folder: Path, *overrides: str, options: SweepOptions | None = None, **cluster: Any
) -> tuple[SweepResult, list[str]]:
    said: list[str] = []
    result = run_sweep(plan(folder, *overrides, **cluster), options or SweepOptions(at_once=2), said.append)
    return result, said


def statuses(result: SweepResult) -> list[str]:
    found: list[str] = result.trials.column("status").to_pylist()
    return found


@pytest.mark.slow
def test_experiments_of_a_sweep_are_those_of_single_runs_and_are_run_once(local_ray: None, tmp_path: Path) -> None:
    overrides = ("algorithm=superfed,fedavg", "seed=0")
    result, said = sweep(tmp_path, *overrides)
    assert statuses(result) == ["finished"] * 2
    assert sum("finished" in line for line in said) == 2
    assert result.groups.column("finished").to_pylist() == [1, 1]
    assert sorted(result.groups.column("selected_on").to_pylist()) == ["", "validation"]
    assert pq.read_table(tmp_path / "sweep" / "trials.parquet").equals(result.trials)
    trial = plan(tmp_path, *overrides).trials[1]
    assert trial.storage.local_path is not None
    alone = {**small_experiment(tmp_path, "alone", "fedavg", backend="inline"), "seed": 0, "algorithm": "fedavg"}
    rayfl.run(alone)
    assert_same(outcome(tmp_path / "alone"), outcome(trial.storage.local_path))
    again, said = sweep(tmp_path, *overrides)
    assert said == []
    assert again.trials.equals(result.trials)


@pytest.mark.slow
def test_a_relative_folder_is_that_of_the_command(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Tune has each process work in a folder that it deletes."""
    monkeypatch.chdir(tmp_path)
    result, _ = sweep(Path("runs"), "seed=0")
    assert statuses(result) == ["finished"]
    assert (tmp_path / "runs" / "sweep" / "trials.parquet").is_file()


@pytest.mark.slow
def test_one_seed_more_runs_that_seed_alone(local_ray: None, tmp_path: Path) -> None:
    result, _ = sweep(tmp_path, "algorithm=fedavg,superfed", "seed=0:2")
    assert statuses(result) == ["finished"] * 4
    assert result.groups.column("finished").to_pylist() == [2, 2]
    larger, said = sweep(tmp_path, "algorithm=fedavg", "seed=0:3")
    assert [line for line in said if line.startswith("starts")] == ["starts: seed=2"]
    assert larger.groups.num_rows == 1


@pytest.mark.slow
def test_the_command_prints_what_is_recorded(local_ray: None, tmp_path: Path) -> None:
    play(FOLDER / "sweep.txt", tmp_path)


@pytest.mark.slow
def test_an_experiment_that_fails_leaves_the_others_and_is_run_again(local_ray: None, tmp_path: Path) -> None:
    planned = plan(tmp_path, "seed=0:2")
    write_record(planned)  # without it the folder is not taken for a sweep's
    taken = planned.trials[0].storage
    taken.write("config.yaml", to_yaml(plan(tmp_path, "seed=7").trials[0].config).encode())
    result, said = sweep(tmp_path, "seed=0:2")
    assert statuses(result) == ["failed", "finished"]
    assert "holds another run: seed was 7, now 0" in result.trials.column("reason")[0].as_py()
    assert any("seed=0: failed: " in line for line in said)
    taken.delete("config.yaml")
    result, said = sweep(tmp_path, "seed=0:2")
    assert statuses(result) == ["finished"] * 2
    assert [line for line in said if line.startswith("starts")] == ["starts: seed=0"]


@pytest.mark.slow
def test_an_experiment_whose_process_dies_is_one_that_failed(local_ray: None, tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "sweep", "fedavg") | {"max_failures": 0}
    deadly = "{name: 'tests.support.faulty:Faulty', failing: [[1, 0], [1, 1], [1, 2], [1, 3], [1, 4]], how: die}"
    space = parse_space([f"algorithm=fedavg,{deadly}", "train.momentum=0"])
    result = run_sweep(plan_sweep(Experiment, content, space, None, 0), SweepOptions(at_once=2), lambda line: None)
    assert statuses(result) == ["finished", "failed"]
    assert result.trials.column("reason")[1].as_py()


@pytest.mark.slow
def test_an_experiment_whose_process_died_once_goes_on(local_ray: None, tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "sweep", "fedavg") | {"max_failures": 1}
    failing = f"failing: [[2, 0], [2, 1], [2, 2], [2, 3], [2, 4]], how: die, marker: {tmp_path / 'died'}"
    space = parse_space([f"algorithm={{name: 'tests.support.faulty:Faulty', {failing}}}", "train.momentum=0"])
    said: list[str] = []
    result = run_sweep(plan_sweep(Experiment, content, space, None, 0), SweepOptions(at_once=1), said.append)
    assert statuses(result) == ["finished"] and (tmp_path / "died").exists()
    assert sum("its process died, and goes on from its last commit" in line for line in said) == 1


@pytest.mark.slow
def test_a_damaged_experiment_is_one_that_failed(local_ray: None, tmp_path: Path) -> None:
    planned = plan(tmp_path, "seed=0:2")
    sweep(tmp_path, "seed=0:2")
    for number in range(5):
        planned.trials[0].storage.delete(f"commits/manifest-{number:06d}.json")
    result, _ = sweep(tmp_path, "seed=0:2")
    assert statuses(result) == ["failed", "finished"]
    assert "no whole commit" in result.trials.column("reason")[0].as_py()


@pytest.mark.slow
def test_experiments_may_have_actors_of_their_own(local_ray: None, tmp_path: Path) -> None:
    result, _ = sweep(tmp_path, "seed=0:2", num_actors=2)
    assert statuses(result) == ["finished"] * 2
    alone = small_experiment(tmp_path, "alone", "fedavg", backend="inline")
    rayfl.run(alone)
    assert_same(outcome(tmp_path / "alone"), outcome(tmp_path / "sweep" / result.trials.column("trial")[0].as_py()))


@pytest.mark.slow
def test_asha_stops_what_lags_behind_for_good(local_ray: None, tmp_path: Path) -> None:
    options = SweepOptions(Measure("loss"), "asha", grace_rounds=2, reduction=2, at_once=1)
    overrides = ("train.lr=0.1,0.05,0.000001,0.0000001", "evaluation.every=1", "train.rounds=6")
    result, said = sweep(tmp_path, *overrides, options=options)
    found = dict(zip(result.trials.column("train.lr").to_pylist(), statuses(result), strict=True))
    assert found[0.1] == "finished"
    assert found[1e-7] == "stopped"
    stopped = yaml.safe_load((tmp_path / "sweep" / STOPPED_FILE).read_text())
    assert len(stopped) == statuses(result).count("stopped")
    rounds = result.trials.column("rounds").to_pylist()
    assert all(done < 6 for done, status in zip(rounds, statuses(result), strict=True) if status == "stopped")
    again, said = sweep(tmp_path, *overrides, options=options)
    assert said == []
    assert again.trials.equals(result.trials)
    # without the scheduler they go on to the end
    whole, _ = sweep(tmp_path, *overrides)
    assert statuses(whole) == ["finished"] * 4


@pytest.mark.slow
def test_a_choice_on_test_data_is_marked(local_ray: None, tmp_path: Path) -> None:
    result, _ = sweep(tmp_path, "train.lr=0.1,0.0001", options=SweepOptions(Measure(judge="test"), at_once=2))
    assert sorted(result.groups.column("selected_on").to_pylist()) == ["", "test"]


def test_a_judge_without_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"judges by validation data, but train\.lr=0.1 has none"):
        sweep(tmp_path, "holdout.validation=0", "train.lr=0.1,0.2", options=SweepOptions(scheduler="asha"))
    with pytest.raises(ConfigError, match="--grace-rounds is 4, but experiments end after 4 rounds"):
        sweep(tmp_path, "seed=0:2", options=SweepOptions(scheduler="asha", grace_rounds=4))
    asha = SweepOptions(scheduler="asha")
    with pytest.raises(ConfigError, match=r"partition\.alpha: asha would compare numbers on different data"):
        sweep(tmp_path, "partition=dirichlet", "partition.num_clients=5", "partition.alpha=1,10", options=asha)
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_run_is_not_taken(tmp_path: Path) -> None:
    rayfl.run(small_experiment(tmp_path, "sweep", "fedavg", backend="inline"))
    with pytest.raises(ConfigError, match="folder of a single run"):
        sweep(tmp_path, "seed=0:2")


def test_two_processes_do_not_run_one_sweep(tmp_path: Path) -> None:
    planned = plan(tmp_path, "seed=0")
    with Lease(planned.folder, 60.0), pytest.raises(RunError, match=r"sweep: process \d+ on .* is working here"):
        run_sweep(planned, SweepOptions(), print)
    assert not planned.folder.names()


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_and_the_same_command_continues_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rayfl", "sweep", "quickstart", "algorithm=fedavg", "seed=0:2"]
    command += [
        "train.rounds=40",
        "evaluation.every=20",
        f"storage_path={tmp_path}",
        "name=sweep",
        "tracking.tensorboard=false",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("sweep/*/commits/manifest*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the same command continues" in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("sweep/*/lease.json"))
    assert "unfinished" in statuses_on(tmp_path)
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert again.returncode == 0, again.stderr
    assert statuses_on(tmp_path) == ["finished"] * 2


def statuses_on(folder: Path) -> list[str]:
    found: list[str] = pq.read_table(folder / "sweep" / "trials.parquet").column("status").to_pylist()
    return found


@pytest.mark.slow
def test_twelve_experiments_on_two_cores(local_ray: None, tmp_path: Path) -> None:
    result, said = sweep(tmp_path, "algorithm=fedavg,superfed,floco", "seed=0:2", "train.lr=0.05,0.1")
    assert statuses(result) == ["finished"] * 12
    assert result.groups.column("finished").to_pylist() == [2] * 6
    assert sum(line.startswith("[") for line in said) == 12
