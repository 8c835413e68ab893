"""Weights & Biases and MLflow, with modules that only note what they were told."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import rayfl
from rayfl.errors import ResourceError
from rayfl.tracking.scalars import hyper_parameters
from tests.support.experiments import small_experiment
from tests.tracking.test_tracking import info

GLOBAL = "top1/test, all clients, received/global"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What fakes of both packages were called with."""
    noted: list[tuple[str, Any]] = []

    def note(name: str, answer: Any = None) -> Any:
        def called(*positional: Any, **named: Any) -> Any:
            noted.append((name, positional or named))
            return answer

        return called

    run = SimpleNamespace(
        log=note("log"), finish=note("finish"), define_metric=note("define_metric"), info=SimpleNamespace(run_id="r1")
    )
    wandb, mlflow = ModuleType("wandb"), ModuleType("mlflow")
    wandb.init = note("init", run)  # type: ignore[attr-defined]
    for name in ("set_tracking_uri", "set_experiment", "log_params", "end_run"):
        setattr(mlflow, name, note(name))
    mlflow.start_run = lambda **named: noted.append(("start_run", named)) or run  # type: ignore[attr-defined, func-returns-value]
    mlflow.log_metrics = lambda values, step: noted.append(("log_metrics", (values, step)))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return noted


def run(folder: Path, **tracking: Any) -> Any:
    experiment = small_experiment(folder, "run", "fedavg", backend="inline")
    return rayfl.run({**experiment, "tracking": {"tensorboard": False, **tracking}})


def test_wandb_gets_the_summaries_of_every_evaluation(calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    result = run(tmp_path, wandb={"enabled": True, "project": "p", "entity": "e", "mode": "offline"})
    begun = dict(calls)["init"]
    assert (begun["project"], begun["entity"], begun["mode"], begun["name"]) == ("p", "e", "offline", "run")
    assert begun["resume"] == "allow"
    assert begun["dir"] == str(tmp_path / "run")
    logged = [content[0] for name, content in calls if name == "log"]
    values = {entry["round"]: entry[GLOBAL] for entry in logged if GLOBAL in entry}
    assert max(values) == result.rounds_completed
    assert calls[-1][0] == "finish"


def test_mlflow_gets_parameters_once_and_summaries(calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    section = {"enabled": True, "experiment": "x", "tracking_uri": "file:///somewhere"}
    result = run(tmp_path, mlflow=section)
    named = dict(calls)
    assert named["set_tracking_uri"] == ("file:///somewhere",)
    assert named["set_experiment"] == ("x",)
    assert named["start_run"] == {"run_id": None, "run_name": "run"}
    assert named["log_params"][0]["algorithm.name"] == "fedavg"
    metrics = [content for name, content in calls if name == "log_metrics"]
    assert max(step for _, step in metrics) == result.rounds_completed
    assert all(re.fullmatch(r"[\w\-./ ]+", name) for values, _ in metrics for name in values)
    assert calls[-1][0] == "end_run"
    assert (tmp_path / "run" / "mlflow_run.txt").read_text() == "r1\n"


def test_a_continued_run_goes_on_in_its_place_in_mlflow(calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    from rayfl.config.storage_section import MlflowConfig
    from rayfl.storage.files import Storage
    from rayfl.tracking.mlflow import Mlflow

    for completed in (0, 3):
        tracker = Mlflow(MlflowConfig(enabled=True), Storage(str(tmp_path)))
        tracker.on_start(info(completed))
        tracker.on_end(completed)
    started = [content for name, content in calls if name == "start_run"]
    assert [entry["run_id"] for entry in started] == [None, "r1"]
    assert [name for name, _ in calls].count("log_params") == 1
    assert "set_tracking_uri" not in dict(calls)


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_package_that_is_not_installed_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ResourceError, match=f"tracking.{package}.enabled is true.*pip install {package}"):
        run(tmp_path, **{package: {"enabled": True}})
    assert not (tmp_path / "run" / "rounds.parquet").exists()


def test_nothing_is_imported_unless_asked_for(calls: list[tuple[str, Any]], tmp_path: Path) -> None:
    run(tmp_path)
    assert calls == []


def test_hyper_parameters_are_flat_and_plain() -> None:
    values = hyper_parameters(info().config)
    assert values["train.rounds"] == 30
    assert values["model.hidden"] == "[64, 64]"
    assert all(isinstance(value, bool | int | float | str) for value in values.values())
