"""New runs from a commit of another one, and from its model alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import rayfl
from algorithms.parts.settings import kept_settings
from algorithms.registry import METHODS
from cluster.rounds.forking import fork
from rayfl.cli.entry import app
from rayfl.errors import ConfigError, ModelError, RunError
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.tracking.costs import read_costs
from rayfl.tracking.timings import read_timings
from tests.support.experiments import assert_same, outcome, small_experiment
from tests.support.toys import assert_equal


def experiment(place: Path, method: str, name: str = "run", **sections: Any) -> dict[str, Any]:
    content = small_experiment(place, name, method, backend="inline")
    return {**content, **sections, "train": {**content["train"], **sections.get("train", {})}}


def done(place: Path, method: str, name: str = "run", **sections: Any) -> Path:
    return Path(rayfl.run(experiment(place, method, name, **sections)).path)


KEEP = {"storage": {"keep_commits": 4}}


@pytest.mark.parametrize("method", ["fedavg", "ditto", "superfed-mm"])
@pytest.mark.first_case
def test_a_fork_without_changes_has_the_bits_of_the_run_that_it_is_from(tmp_path: Path, method: str) -> None:
    folder = done(tmp_path, method, **KEEP)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    made = CliRunner().invoke(app, ["fork", str(folder), "--round", "2", "--name", "forked"], catch_exceptions=False)
    assert made.exit_code == 0 and f"rayfl run {tmp_path / 'forked'}" in made.output.replace("\n", " ")
    forked = Storage(str(tmp_path / "forked"))
    assert verify(forked).problems == []
    assert [line["round"] for line in read_timings(forked)] == [line["round"] for line in read_costs(forked)] == [1, 2]
    assert rayfl.run(tmp_path / "forked").rounds_completed == 4
    assert_same(outcome(tmp_path / "forked"), outcome(folder))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    content = yaml.safe_load((tmp_path / "forked" / "config.yaml").read_text())
    assert (content["init"]["from"], content["init"]["round"], content["init"]["what"]) == (str(folder), 2, "commit")


def test_a_fork_goes_on_with_other_options_and_more_rounds(tmp_path: Path) -> None:
    folder = done(tmp_path, "fedavg", **KEEP)
    config, begun = fork(str(folder), "other", 2, ["train.lr=0.01", "train.rounds=6"])
    assert (config.run_name, config.train.lr, begun) == ("other", 0.01, 2)
    result = rayfl.run(tmp_path / "other")
    assert result.rounds_completed == 6
    mine, theirs = outcome(tmp_path / "other"), outcome(folder)
    early = [row for row in mine.rounds.to_pylist() if row["round"] <= 2]
    assert early == [row for row in theirs.rounds.to_pylist() if row["round"] <= 2]
    assert not torch.equal(mine.server["model"]["head.weight"], theirs.server["model"]["head.weight"])
    # It is another experiment than one that had these options from the start.
    content = yaml.safe_load((tmp_path / "other" / "config.yaml").read_text())
    with pytest.raises(RunError, match="holds another run"):
        rayfl.run({**content, "init": {}})
    # The folder of the other run is not needed any more.
    shutil.rmtree(folder)
    assert rayfl.run(tmp_path / "other").rounds_completed == 6


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["dataset.name=synthetic"], "dataset"),
        (["seed=3"], "seed: a fork goes on with the clients"),
        (["algorithm=fedprox"], "algorithm: a fork goes on"),
        (["model.hidden=[9]"], "model: a fork goes on"),
        (["task.metrics=[f1_macro]"], "task: a fork goes on"),
        (["stages.name=samples", "stages.count=2", "stages.rounds=3"], "stages: a fork goes on"),
        (["train.optimizer=adam", "train.momentum=0"], r"train\.optimizer: a fork goes on"),
        (["train.persist_optimizer=true"], r"train\.persist_optimizer: a fork goes on"),
        (["train.rounds=2"], r"train\.rounds=2, but the fork begins after round 2"),
        (["init.round=1"], r"init\.round: a fork's name is --name"),
    ],
)
@pytest.mark.two_cases
def test_a_fork_cannot_change_what_states_depend_on(tmp_path: Path, overrides: list[str], why: str) -> None:
    folder = done(tmp_path, "fedavg", **KEEP)
    with pytest.raises(ConfigError, match=why):
        fork(str(folder), "other", 2, overrides)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("old", "changed", "rounds", "refused"),
    [
        ({"name": "flda"}, {"gate_input": "raw"}, 1, ["gate_input"]),
        ({"name": "flda"}, {"gate_lr": 0.5}, 1, []),
        ({"name": "l2gd"}, {"aggregation_probability": 0.9, "penalty_weight": 2.0}, 1, ["aggregation_probability"]),
        ({"name": "floco", "assignment_round": 2}, {"assignment_round": 100}, 2, []),
        ({"name": "floco", "assignment_round": 2}, {"assignment_round": 100}, 3, ["assignment_round"]),
        ({"name": "floco", "assignment_round": 100}, {"assignment_round": 2}, 3, ["assignment_round"]),
        ({"name": "floco_plus", "assignment_round": 2}, {"scale_grid": "log", "radius": 0.5}, 3, ["scale_grid"]),
    ],
)
def test_settings_that_what_is_kept_depends_on(
    old: dict[str, Any], changed: dict[str, Any], rounds: int, refused: list[str]
) -> None:
    before, after = (METHODS[old["name"]].model_validate({**old, **more}) for more in ({}, changed))
    assert kept_settings(before, after, rounds) == refused


def test_a_fork_with_a_setting_that_states_depend_on_is_refused(tmp_path: Path) -> None:
    folder = done(tmp_path, "fedavg", algorithm={"name": "flda"}, train={"rounds": 2})
    with pytest.raises(ConfigError, match=r"algorithm\.gate_input: a fork goes on with the clients, models and states"):
        fork(str(folder), "other", 2, ["algorithm.gate_input=raw", "train.rounds=3"])
    assert fork(str(folder), "other", 2, ["algorithm.gate_lr=0.5", "train.rounds=3"])[1] == 2


def test_a_fork_names_the_commits_that_there_are_and_never_overwrites(tmp_path: Path) -> None:
    folder = done(tmp_path, "fedavg")
    with pytest.raises(RunError, match="no commit of round 1; kept are those of rounds: 3, 4"):
        fork(str(folder), "other", 1, [])
    with pytest.raises(RunError, match="is a run already: choose another --name"):
        fork(str(folder), "run", 3, [])


def test_a_fork_that_was_cut_short_is_no_new_run_and_is_completed(tmp_path: Path) -> None:
    folder = done(tmp_path, "ditto")
    fork(str(folder), "other", 3, [])
    for path in (tmp_path / "other" / "commits").glob("*.json"):
        path.unlink()
    with pytest.raises(RunError, match="the fork was cut short"):
        rayfl.run(tmp_path / "other")
    fork(str(folder), "other", 3, [])
    rayfl.run(tmp_path / "other")
    assert_same(outcome(tmp_path / "other"), outcome(folder))


def server_model(folder: Path, round: int) -> Any:
    store = CommitStore(Storage(str(folder)))
    return store.read_server(store.read_manifest(f"manifest-{round:06d}.json"))["model"]


@pytest.mark.parametrize("method", ["fedavg", "ditto", "local"])
@pytest.mark.first_case
def test_server_and_clients_begin_from_the_model_of_another_run(tmp_path: Path, method: str) -> None:
    source = done(tmp_path, "fedprox", "source", **KEEP)
    nothing = {"lr": 0.0, "rounds": 1, "momentum": 0.0}
    folder = done(tmp_path, method, "begun", init={"from": str(source), "round": 2}, train=nothing)
    found = outcome(folder)
    model = server_model(source, 2)
    if "model" in found.server:
        assert_equal(found.server["model"], model)
    for state in found.states.values():
        for tree in state.values():
            assert_equal(tree, model)
    content = yaml.safe_load((folder / "config.yaml").read_text())
    assert content["init"]["round"] == 2 and len(content["init"]["sha256"]) == 64
    assert verify(Storage(str(folder))).problems == []


@pytest.mark.slow
def test_a_run_from_a_model_has_its_own_copy_and_continues_without_the_other(tmp_path: Path) -> None:
    source = done(tmp_path, "fedavg", "source", **KEEP)
    whole = done(tmp_path, "fedavg", "whole", init={"from": str(source)})
    begun = done(tmp_path, "fedavg", "begun", init={"from": str(source)}, train={"rounds": 2})
    shutil.rmtree(source)
    rayfl.run(begun, train__rounds=4)
    assert_equal(outcome(begun).server, outcome(whole).server)
    (whole / "initial.safetensors").write_bytes((whole / "initial.safetensors").read_bytes()[:-4] + b"abcd")
    assert any("initial.safetensors" in problem for problem in verify(Storage(str(whole))).problems)


def test_what_a_run_begins_from_is_part_of_what_it_is_and_a_moved_folder_is_not(tmp_path: Path) -> None:
    from algorithms.registry import Experiment
    from rayfl.config.loading import load_config

    source = done(tmp_path, "fedavg", "source", **KEEP)
    moved = Path(shutil.copytree(source, tmp_path / "moved"))

    def fingerprint(**init: Any) -> str:
        return load_config(Experiment, experiment(tmp_path, "fedavg", init=init), {}).fingerprint()

    prints = [fingerprint(), fingerprint(**{"from": str(source)}), fingerprint(**{"from": str(source), "round": 2})]
    assert len(set(prints)) == 3
    assert fingerprint(**{"from": str(moved)}) == prints[1]
    assert fingerprint(**{"from": str(moved), "round": 4}) == prints[1]


def test_models_that_do_not_fit_and_runs_that_are_not_there_are_refused(tmp_path: Path) -> None:
    source = done(tmp_path, "fedavg", "source")
    with pytest.raises(ModelError, match="does not fit the section model: missing"):
        done(tmp_path, "fedavg", init={"from": str(source)}, model={"name": "two_nn", "hidden": [12, 12]})
    with pytest.raises(ConfigError, match=r"init\.from: .*has no commit: give the folder of a run"):
        done(tmp_path, "fedavg", init={"from": str(tmp_path / "nothing")})
    with pytest.raises(ConfigError, match="has no commit of round 1; kept are those of rounds 3, 4"):
        done(tmp_path, "fedavg", init={"from": str(source), "round": 1})
    with pytest.raises(ConfigError, match="round need from, the folder of a run"):
        done(tmp_path, "fedavg", init={"round": 1})
    local = done(tmp_path, "local", "alone")
    with pytest.raises(ConfigError, match="keeps no model that another run could begin from"):
        done(tmp_path, "fedavg", init={"from": str(local)})
