"""Runs that an older rayfl has begun are found, continued where the bits are the same, and never begun twice."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import rayfl
from algorithms.registry import Experiment
from cluster.jobs.jobs import differing_keys
from rayfl.config import added, identity
from rayfl.config.identity import OlderRule
from rayfl.config.loading import load_config
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import RunError
from rayfl.runs.older_runs import where_begun
from rayfl.runs.verification import verify
from rayfl.storage.files import Storage
from rayfl.sweeps.space import parse_space
from rayfl.sweeps.trials import plan_sweep
from rayfl.tracking.callback import RunInfo
from tests.support.damage import manifests
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment

TODAY = ExperimentConfig.identity
OF_THEN = ("system", "noise")
"""What did not count then."""


def counted_then(content: Any) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in OF_THEN}


@pytest.fixture(autouse=True)
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "OLDER", (OlderRule("0.0.9", counted_then, frozenset({"cpu"}), "all was else"),))


@contextmanager
def older_rayfl() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExperimentConfig, "identity", lambda self: counted_then(TODAY(self)))
        patch.setattr(identity, "OLDER", ())
        yield


def experiment(folder: Path, name: str | None = None) -> dict[str, Any]:
    return small_experiment(folder, "unused", "scaffold", backend="inline") | {"name": name}


def begun(folder: Path, name: str | None = None) -> Path:
    """The folder of a run that an older rayfl has begun."""
    with older_rayfl(), pytest.raises(KeyboardInterrupt):
        rayfl.run(experiment(folder, name), callbacks=[Interrupt(2)])
    (made,) = folder.iterdir()
    return made


class Seen(rayfl.Callback):
    def on_start(self, run: RunInfo) -> None:
        self.run = run


def test_a_run_goes_on_in_the_folder_that_an_older_rayfl_has_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, seen = begun(tmp_path / "runs"), Seen()
    rayfl.run(small_experiment(tmp_path, "calm", "scaffold", backend="inline"))
    (before,) = {manifest.fingerprint for manifest in manifests(folder)}
    result = rayfl.run(experiment(tmp_path / "runs"), callbacks=[seen])
    assert result.path == str(folder)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]
    assert f"{folder} is this experiment, begun by rayfl 0.0.9 or before: it goes on there" in caplog.text
    assert_same(outcome(tmp_path / "calm"), outcome(folder))
    assert {manifest.fingerprint for manifest in manifests(folder)} == {before}
    assert seen.run.fingerprint == before  # what trackers tell runs apart by
    assert verify(Storage(str(folder))).problems == []
    caplog.clear()
    assert rayfl.run(experiment(tmp_path / "runs")).rounds_completed == 4
    assert folder.name in caplog.text


def test_a_name_of_ones_own_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = begun(tmp_path / "runs", "mine")
    assert rayfl.run(experiment(tmp_path / "runs", "mine")).rounds_completed == 4
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]
    assert verify(Storage(str(folder))).problems == []


def test_todays_folder_goes_before_an_older_one(tmp_path: Path) -> None:
    old = begun(tmp_path / "runs")
    config = load_config(Experiment, experiment(tmp_path / "runs"), {})
    (tmp_path / "runs" / config.run_name).mkdir()
    (tmp_path / "runs" / config.run_name / "config.yaml").write_text("{}")
    assert where_begun(config).run_name == config.run_name != old.name


@pytest.mark.parametrize(("devices", "where"), [([], "it would"), (["cuda"], "on cpu it would")])
def test_an_older_run_is_refused_where_it_would_not_go_on_as_it_began(
    devices: list[str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begun(tmp_path / "runs")
    before = {path: path.read_bytes() for path in (folder / "commits").iterdir()}
    rule = OlderRule("0.0.9", counted_then, frozenset(devices), "all was else")
    monkeypatch.setattr(identity, "OLDER", (rule,))
    said = rf"begun by rayfl 0\.0\.9 or before, and {where} not go on as it began: all was else\. Go on with"
    with pytest.raises(RunError, match=said):
        rayfl.run(experiment(tmp_path / "runs"))
    assert {path: path.read_bytes() for path in (folder / "commits").iterdir()} == before
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_a_manifest_of_another_experiment_is_refused_all_the_same(tmp_path: Path) -> None:
    folder = begun(tmp_path / "runs", "mine")
    text = yaml.safe_load((folder / "config.yaml").read_text())
    text["train"]["lr"] = 0.2
    (folder / "config.yaml").write_text(yaml.safe_dump(text))
    other = experiment(tmp_path / "runs", "mine")
    other["train"] = other["train"] | {"lr": 0.2}
    with pytest.raises(RunError, match=r"is of another run"):
        rayfl.run(other)


def test_a_job_and_a_reproduced_table_find_the_folder_by_their_names(tmp_path: Path) -> None:
    folder = begun(tmp_path / "runs")
    config = load_config(Experiment, experiment(tmp_path / "runs"), {})
    submitted = config.model_copy(update={"name": config.run_name})
    assert where_begun(submitted).run_name == folder.name
    digits = config.fingerprint()[:8]
    begun_then = tmp_path / "runs" / f"scaffold-seed0-{folder.name[-8:]}"
    folder.rename(begun_then)
    planned = config.model_copy(update={"name": f"scaffold-seed0-{digits}"})
    assert where_begun(planned).run_name == begun_then.name


def test_a_job_of_an_older_rayfl_is_the_same_run(tmp_path: Path) -> None:
    config = load_config(Experiment, experiment(tmp_path), {})
    with older_rayfl():
        fingerprint = config.fingerprint()
    assert fingerprint != config.fingerprint()
    for known in (fingerprint, config.fingerprint()):
        assert differing_keys({"fingerprint": known, "storage": str(tmp_path)}, config) == []
    assert differing_keys({"fingerprint": "else", "storage": "/else"}, config) == ["fingerprint", "storage"]


@pytest.mark.parametrize("name", [None, "mine"])
def test_a_sweep_goes_on_in_the_folders_that_an_older_rayfl_has_begun(name: str | None, tmp_path: Path) -> None:
    with older_rayfl():
        old = plan_sweep(Experiment, experiment(tmp_path, name), parse_space(["seed=0,1"]), None, 0)
    for trial in old.trials:
        trial.storage.write("config.yaml", b"{}")
    old.folder.write("sweep.yaml", b"{}")
    new = plan_sweep(Experiment, experiment(tmp_path, name), parse_space(["seed=0,1,2"]), None, 0)
    again = plan_sweep(Experiment, experiment(tmp_path, name), parse_space(["seed=0,1"]), None, 0)
    assert again.folder == old.folder
    assert [trial.storage for trial in again.trials] == [trial.storage for trial in old.trials]
    if name is None:
        assert new.folder != old.folder  # other experiments are another sweep
    else:
        known = {trial.storage.uri for trial in old.trials}
        assert [trial.storage.uri in known for trial in new.trials] == [True, True, False]


def test_what_the_same_options_meant_before_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, default = "holdout.public", 0
    monkeypatch.setattr(identity, "OLDER", ())
    monkeypatch.setattr(added, "ADDED", {path: default})
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(experiment(tmp_path / "runs"), callbacks=[Interrupt(1)])
    (folder,) = (tmp_path / "runs").iterdir()
    recorded = yaml.safe_load((folder / "config.yaml").read_text())
    del recorded["holdout"]["public"]
    (folder / "config.yaml").write_text(yaml.safe_dump(recorded))
    # From now on the default, 0, is not what was done before.
    monkeypatch.setattr(added, "ADDED", {path: 7})
    config = load_config(Experiment, experiment(tmp_path / "runs"), {})
    with caplog.at_level(logging.WARNING):
        assert where_begun(config).run_name == config.run_name != folder.name
    assert f"{folder} has what this configuration meant to an older rayfl: to go on with that run set" in caplog.text
    assert "holdout.public=7" in caplog.text
    with pytest.raises(RunError, match=r"holds another run: holdout\.public was 7, now 0"):
        rayfl.run(experiment(tmp_path / "runs", folder.name))
