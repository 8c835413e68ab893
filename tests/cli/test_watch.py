"""A run is followed from another shell: finished, under way and stopped; lines for files, JSON for programs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import rayfl
from rayfl.cli.entry import app
from rayfl.errors import RunError
from tests.support.experiments import small_experiment

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return Path(rayfl.run(small_experiment(folder, "run", "superfed-mm", backend="inline")).path)


def test_a_finished_run_is_one_line_and_changes_nothing(finished: Path) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    done = CliRunner().invoke(app, ["watch", str(finished)])
    assert done.exit_code == 0
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  round 4/4  [\d.e-]+ s a round  00:00:00 left  test accuracy: global [\d.]+%.*  finished\n",
        done.output,
    )
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_json_has_everything_in_fields(finished: Path) -> None:
    found = json.loads(CliRunner().invoke(app, ["watch", str(finished), "--json"]).output)
    assert (found["schema"], found["state"]) == ("rayfl.watch/1", "finished")
    assert (found["rounds_completed"], found["rounds"]) == (4, 4)
    assert (found["method"], found["dataset"], found["evaluated"]) == ("superfed", "digits", 4)
    assert 0 < found["accuracy"] <= 1 and found["seconds_a_round"] > 0 and found["seconds_left"] == 0


@pytest.mark.slow
def test_a_run_under_way_is_followed_until_it_stops(tmp_path: Path) -> None:
    config, go_on = tmp_path / "run.yaml", tmp_path / "go on"
    config.write_text(yaml.safe_dump(small_experiment(tmp_path, "run", "fedavg", backend="inline")))
    script = str(ROOT / "tests" / "support" / "waiting_run.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(
        [sys.executable, script, str(config), "3", str(go_on)], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        assert any("waiting" in line for line in running.stdout)
        seen = json.loads(CliRunner().invoke(app, ["watch", str(tmp_path / "run"), "--json", "--once"]).output)
        assert (seen["state"], seen["rounds"]) == ("running", 4)
        assert seen["holder"].startswith(f"process {running.pid} on ")
        assert seen["rounds_completed"] in (2, 3)
    finally:
        running.kill()
        running.wait()
    done = CliRunner().invoke(app, ["watch", str(tmp_path / "run")])
    assert done.exit_code == 1 and "stopped" in done.output
    assert f"no process works on {tmp_path / 'run'}: `rayfl run" in " ".join(done.output.split())
    assert CliRunner().invoke(app, ["watch", str(tmp_path / "run"), "--once"]).exit_code == 0


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["watch", str(tmp_path)])
    assert isinstance(done.exception, RunError) and "is no run's folder" in str(done.exception)
