"""Rounds without a barrier on Ray: the bits of one process, whatever the number of actors and of kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import yaml

import rayfl
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.cluster.rounds.test_recovery import ActorKiller, long_rounds
from tests.support.experiments import assert_same, outcome
from tests.system.test_buffered_runs import experiment

ROOT = Path(__file__).parents[3]


def on_actors(folder: Path, name: str, **cluster: Any) -> dict[str, Any]:
    return {**experiment(folder, name, server_momentum=0.3), "cluster": cluster}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run in this process, some of whose updates are old."""
    folder = tmp_path_factory.mktemp("alone")
    result = rayfl.run(long_rounds(on_actors(folder, "run", backend="inline")))
    assert pc.max(result.rounds["staleness_max"]).as_py() >= 2
    return folder / "run"


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_a_killed_actor_changes_no_bit(alone: Path, tmp_path: Path) -> None:
    killer = ActorKiller(after_round=3, delay_s=0.0)
    rayfl.run(long_rounds(on_actors(tmp_path, "killed", num_actors=3)), callbacks=[killer])
    assert len(killer.failures) == 1
    assert_same(outcome(alone), outcome(tmp_path / "killed"))


@pytest.mark.slow
def test_a_killed_driver_continues_to_the_same_bits(alone: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(long_rounds(on_actors(tmp_path, "killed", num_actors=2))))
    for moment, round in (("inside", 3), ("between", 5)):
        killed = _start("tests/support/killed_run.py", str(config), moment, str(round))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    manifest = CommitStore(Storage(str(tmp_path / "killed"))).latest()
    assert manifest is not None and 0 < manifest.rounds_completed < 8
    finished = _start("-m", "rayfl", "run", str(config))
    assert finished.returncode == 0, finished.stderr
    assert "continues after round" in finished.stdout
    assert_same(outcome(alone), outcome(tmp_path / "killed"))


def _start(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
