"""A run is given more rounds: the bits of a run that had them from the start, or a refusal with the reason."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from typer.testing import CliRunner

import rayfl
from algorithms.registry import METHODS, Experiment
from cluster.rounds.forking import fork
from rayfl.cli.entry import app
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, RunError
from rayfl.runs.committed import CommittedModels, single_model
from rayfl.runs.folder import open_run
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.support.experiments import Outcome, assert_same, outcome, small_experiment
from tests.support.toys import assert_equal

ROOT = Path(__file__).parents[3]


def experiment(storage: Path, method: str, rounds: int, name: str = "run") -> dict[str, Any]:
    content = small_experiment(storage, name, method, backend="inline")
    return {**content, "train": {**content["train"], "rounds": rounds}}


def done(storage: Path, method: str, rounds: int, name: str = "run") -> Path:
    return Path(rayfl.run(experiment(storage, method, rounds, name)).path)


def without_round(table: pa.Table, round: int) -> list[dict[str, Any]]:
    return [row for row in table.to_pylist() if row["round"] != round]


def assert_extended(extended: Outcome, whole: Outcome, at: int) -> None:
    """Equal to the bit, but that the extended run was evaluated as after a last round in the midst of it."""
    assert_equal(extended.server, whole.server)
    assert_equal(extended.states, whole.states)
    for name in ("rounds", "clients", "calibration"):
        mine, other = getattr(extended, name), getattr(whole, name)
        assert without_round(mine, at) == without_round(other, at)
        extra = mine.num_rows - other.num_rows
        rows = mine.to_pylist()
        assert extra >= 0 and all(row in rows for row in other.to_pylist())


@pytest.mark.parametrize("method", ["fedavg", "ditto", "floco", "pfedme"])
@pytest.mark.first_case
def test_a_finished_run_goes_on_to_the_same_bits(tmp_path: Path, method: str) -> None:
    whole = outcome(done(tmp_path / "whole", method, 6))
    folder = done(tmp_path / "extended", method, 4)
    result = rayfl.run(folder, train__rounds=6)
    assert (result.rounds_completed, Path(result.path)) == (6, folder)
    assert_extended(outcome(folder), whole, 4)
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["rounds"] == 6
    report = verify(Storage(str(folder)))
    assert (report.problems, report.commits) == ([], [5, 6])
    starts = json.loads((folder / "environment.json").read_text())
    assert [(entry["rounds_completed"], entry["rounds"]) for entry in starts] == [(0, 4), (4, 6)]


def test_the_command_extends_continues_and_names_what_it_cannot_change(tmp_path: Path) -> None:
    folder = done(tmp_path, "fedavg", 2)
    cli = CliRunner()
    assert cli.invoke(app, ["run", str(folder), "train.rounds=3"]).exit_code == 0
    again = cli.invoke(app, ["run", str(folder)])
    assert again.exit_code == 0 and "after round 3" in again.output
    assert f"{folder} had 2 rounds, of which 2 are done, and has 3 now" in (folder / "rayfl.log").read_text()
    with pytest.raises(RunError, match=r"train\.lr was 0\.1, now 0\.5"):
        rayfl.run(folder, train__lr=0.5)
    with pytest.raises(RunError, match=r"train\.rounds was 3, now 2"):
        rayfl.run(folder, train__rounds=2)
    # More threads add in another order, so that rounds would not be those of one run.
    for rounds in (3, 4):
        with pytest.raises(RunError, match=r"cluster\.threads_per_actor was 1, now 2"):
            rayfl.run(folder, cluster__threads_per_actor=2, train__rounds=rounds)
    with pytest.raises(ConfigError, match="name does not apply to a run that is there"):
        rayfl.run(folder, name="other")
    with pytest.raises(RunError, match="is no run's folder"):
        rayfl.run(tmp_path)
    # Another start of it, which does not know the folder, is told how.
    with pytest.raises(RunError, match=rf"`rayfl run {folder} train.rounds=5` gives it more rounds"):
        rayfl.run(experiment(tmp_path, "fedavg", 5))
    page = cli.invoke(app, ["report", str(folder)])
    assert page.exit_code == 0
    assert "after round 2 from 2 to 3 rounds" in (folder / "report" / "report.html").read_text()


@pytest.mark.parametrize(
    ("method", "changes", "why"),
    [
        ("superfed-mm", {}, r"algorithm=superfed that goes by train.rounds would have been another in round 2, False"),
        ("pfedsim", {}, "algorithm=pfedsim that goes by train.rounds"),
        ("fedavg", {"schedule": {"name": "cosine"}}, r"learning rate \(train.schedule=cosine\).*in round 2,"),
        ("fedavg", {"schedule": {"name": "linear"}}, r"learning rate \(train.schedule=linear\)"),
        ("fedkd", {}, r"algorithm=fedkd that goes by train.rounds would have been another in round 1, 0\.95"),
        ("fedphp", {}, "algorithm=fedphp that goes by train.rounds"),
    ],
)
@pytest.mark.first_case
def test_what_goes_by_fractions_of_the_rounds_is_refused(
    tmp_path: Path, method: str, changes: dict[str, Any], why: str
) -> None:
    content = experiment(tmp_path, method, 4)
    folder = Path(rayfl.run({**content, "train": {**content["train"], **changes}}).path)
    before = {path.name: path.read_bytes() for path in folder.rglob("*.json") if "lease" not in path.name}
    with pytest.raises(RunError, match=rf"cannot be extended from 4 to 8 rounds: .*{why}.*4 rounds are done"):
        rayfl.run(folder, train__rounds=8)
    assert before == {path.name: path.read_bytes() for path in folder.rglob("*.json") if "lease" not in path.name}
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["rounds"] == 4


@pytest.mark.slow
def test_fedme_is_extended_unless_clients_have_trained_first(tmp_path: Path) -> None:
    def run(name: str, rounds: int, **options: Any) -> Path:
        content = {**experiment(tmp_path, "fedme", rounds, name), "model": {"name": "two_nn", "hidden": [12]}}
        return Path(rayfl.run({**content, "algorithm": {"name": "fedme", "model_clustering": False, **options}}).path)

    folder = run("extended", 1)
    rayfl.run(folder, train__rounds=2)
    assert_extended(outcome(folder), outcome(run("whole", 2)), 1)
    with pytest.raises(RunError, match=r"algorithm=fedme .* another in round 1, 2 in place of 1"):
        rayfl.run(run("warm", 1, warm=True, initial_architecture=0), train__rounds=2)


@pytest.mark.parametrize("schedule", [{"name": "step", "every": 3}, {"name": "exponential", "factor": 0.9}])
@pytest.mark.first_case
def test_schedules_by_rounds_are_extended(tmp_path: Path, schedule: dict[str, Any]) -> None:
    def run(name: str, rounds: int) -> Path:
        content = experiment(tmp_path, "fedavg", rounds, name)
        return Path(rayfl.run({**content, "train": {**content["train"], "schedule": schedule}}).path)

    folder = run("extended", 4)
    rayfl.run(folder, train__rounds=6)
    assert_extended(outcome(folder), outcome(run("whole", 6)), 4)


@pytest.mark.slow
def test_a_run_that_stopped_before_its_methods_second_phase_is_extended(tmp_path: Path) -> None:
    whole = outcome(done(tmp_path / "whole", "superfed-mm", 8))
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(experiment(tmp_path / "stopped", "superfed-mm", 4)))
    killed(str(config), "inside", "2")
    rayfl.run(tmp_path / "stopped" / "run", train__rounds=8)
    assert_same(outcome(tmp_path / "stopped" / "run"), whole)


def killed(*arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = str(ROOT / "tests" / "support" / "killed_run.py")
    ended = subprocess.run([sys.executable, script, *arguments], env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["inside", "between"])
def test_an_extended_run_that_is_killed_goes_on_to_the_same_bits(tmp_path: Path, moment: str) -> None:
    whole = outcome(done(tmp_path / "whole", "ditto", 6))
    folder = done(tmp_path / "extended", "ditto", 4)
    killed(str(folder), moment, "6" if moment == "inside" else "5", "train.rounds=6")
    rayfl.run(folder)
    assert_extended(outcome(folder), whole, 4)


def test_an_extension_that_was_cut_short_is_completed_by_the_same_command(tmp_path: Path) -> None:
    whole = outcome(done(tmp_path / "whole", "fedavg", 6))
    folder = done(tmp_path / "extended", "fedavg", 4)
    before = (folder / "config.yaml").read_bytes()
    # config.yaml is the last thing that is written, and of the commits one may still be as it was.
    stamped = max(path.name for path in (folder / "commits").glob("manifest-*.json"))
    content = yaml.safe_load(before)
    longer = load_config(Experiment, {**content, "train": {**content["train"], "rounds": 6}}, {})
    store = CommitStore(Storage(str(folder)))
    manifest = store.read_manifest(stamped)
    store.replace_manifest(manifest.model_copy(update={"fingerprint": longer.fingerprint()}))
    rayfl.run(folder, train__rounds=6)
    assert_extended(outcome(folder), whole, 4)


@pytest.mark.slow
def test_both_copies_of_a_run_are_extended(tmp_path: Path) -> None:
    whole = outcome(done(tmp_path / "whole", "fedavg", 6))
    content = {**experiment(tmp_path, "fedavg", 4), "storage": {"copies": 2}}
    folder = Path(rayfl.run(content).path)
    rayfl.run(folder, train__rounds=6)
    shutil.rmtree(folder / "commits")
    rayfl.run(folder)
    assert_extended(outcome(folder), whole, 4)


def test_a_run_whose_configuration_is_cut_off_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("name: run\nseed: 0\n")
    with pytest.raises(ConfigError, match=r"run/config.yaml: .*\n(.*\n)*.*algorithm: required"):
        rayfl.run(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"^configuration: .*\n(.*\n)*.*train.round: unknown"):
        rayfl.run(str(tmp_path / "run"), train__round=3)


def test_of_a_method_of_ones_own_nobody_knows_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = {
        **experiment(tmp_path, "fedavg", 2),
        "algorithm": {"name": "tests.runs_of_0_1_0.remembering:Remembering"},
    }
    folder = Path(rayfl.run(content).path)
    with caplog.at_level(logging.WARNING, "rayfl"):
        rayfl.run(folder, train__rounds=3)
    assert "does not say whether a round depends on train.rounds (Algorithm.course)" in caplog.text


def test_methods_that_read_the_number_of_rounds_say_what_they_make_of_it() -> None:
    """A method that reads ``context.rounds`` in a round overrides ``course``; others only check or warn with it."""
    only_checks = {
        "cfl",
        "gcfl",
        "dense",
        "fedamp",
        "fedcorr",
        "federaser",
        "fedld",
        "fedfed",
        "fedpft",
        "fednoro",
        "fednova",
        "l2gd",
        "rofl",
        "fedmtl",
        "floco",
        "floco_plus",
        "hierfavg",
    }
    reading = set()
    for name, method in METHODS.items():
        modules = {base.__module__ for base in method.__mro__} - {"algorithms.base"}
        files = [sys.modules[module].__file__ for module in modules if module.startswith("algorithms.")]
        texts = [Path(str(file)).read_text() for file in files]
        if any("context.rounds" in text for text in texts):
            reading.add(name)
    overriding = {name for name, method in METHODS.items() if method.course is not rayfl.Algorithm.course}
    assert reading - only_checks == overriding


@pytest.mark.parametrize("place", ["run", "forked"])
@pytest.mark.first_case
def test_a_round_that_was_the_last_keeps_the_models_of_its_evaluation(tmp_path: Path, place: str) -> None:
    config = experiment(tmp_path, "fedavg", 2) | {"storage": {"keep_commits": 9}}
    config["algorithm"] = {"name": "fedavg", "finetune_epochs": 1}
    folder = Path(rayfl.run(config).path)
    before = CommittedModels(open_run(str(folder), Experiment), 2).predictors(0)
    assert "finetuned" in before
    if place == "forked":
        fork(str(folder), place, 2, {"train.rounds": 3})
    rayfl.run(tmp_path / place, train__rounds=3)
    after = CommittedModels(open_run(str(tmp_path / place), Experiment), 2).predictors(0)
    assert_equal(dict(single_model(after["finetuned"], "")), dict(single_model(before["finetuned"], "")))
    assert "finetuned" not in CommittedModels(open_run(str(folder), Experiment), 1).predictors(0)
