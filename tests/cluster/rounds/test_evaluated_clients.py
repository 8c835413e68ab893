"""Evaluations of some of the clients before the last round, and of all after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import rayfl
from algorithms.registry import METHODS, Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, DataError, RunError
from rayfl.experiment.parts import Parts
from rayfl.experiment.result import Result
from rayfl.report.curves import progress_of_models
from rayfl.report.drawing import Drawing
from rayfl.report.rows import drawn
from rayfl.runs.finding import check_measured, load_run
from rayfl.runs.measured import Measured
from rayfl.runs.rows import personalized_model, where
from tests.cluster.rounds.test_unseen_clients import experiment as twelve_clients

CLIENTS = 12


def experiment(folder: Path, name: str = "run", method: str = "fedper", **changes: Any) -> dict[str, Any]:
    """Twelve clients of digits for three rounds, five of them scored after the first two."""
    content = twelve_clients(folder, name, method, **{"evaluation": {"every": 1, "clients": 5}, **changes})
    return {**content, "train": {**content["train"], "rounds": 3}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return rayfl.run(experiment(tmp_path_factory.mktemp("runs")))


def evaluated(run: Result, round: int) -> set[int]:
    return set(where(run.clients, cohort="all", split="test", round=round)["client"].to_pylist())


def test_only_the_last_evaluation_is_of_all_clients(run: Result) -> None:
    rows = where(run.rounds, cohort="all", split="test", model="personalized").to_pylist()
    assert [(row["round"], row["clients"]) for row in rows] == [(1, 5), (2, 5), (3, CLIENTS)]
    for row in rows:
        own = where(run.clients, cohort="all", split="test", round=row["round"], model="personalized")
        assert row["top1"] == pytest.approx(np.mean(own["top1"].to_pylist()))
    assert evaluated(run, 1) != evaluated(run, 2), "others each time"


def test_the_seed_draws_them_the_same_for_every_method(run: Result, tmp_path: Path) -> None:
    other = rayfl.run(experiment(tmp_path, method="fedavg"))
    assert [evaluated(other, round) for round in (1, 2)] == [evaluated(run, round) for round in (1, 2)]
    parts = Parts(load_config(Experiment, experiment(tmp_path, seed=1), {}))
    assert parts.evaluated(1) != sorted(evaluated(run, 1))


def test_training_and_the_final_rows_do_not_depend_on_it(run: Result, tmp_path: Path) -> None:
    everybody = rayfl.run(experiment(tmp_path, evaluation={"every": 1}))
    assert where(everybody.clients, round=3).equals(where(run.clients, round=3))
    for round in (1, 2):
        drawn = sorted(evaluated(run, round))
        rows = where(everybody.clients, round=round, cohort="all").to_pylist()
        assert where(run.clients, round=round, cohort="all").to_pylist() == [r for r in rows if r["client"] in drawn]


def test_reports_say_how_many_clients_a_curve_is_of(run: Result) -> None:
    shown = progress_of_models(load_run(str(run.path), METHODS))[0]
    assert isinstance(shown, Drawing)
    assert "over all 12 clients. Evaluations before the last round are of 5 clients" in shown.caption
    assert shown.data["clients"].to_pylist()[:3] == [5, 5, CLIENTS]


def test_the_fingerprint_counts_it_only_where_it_says_something(tmp_path: Path) -> None:
    plain = {**experiment(tmp_path), "evaluation": {}}
    everybody, some = load_config(Experiment, plain, {}), load_config(Experiment, plain, {"evaluation.clients": 5})
    assert "clients" not in everybody.identity()["evaluation"]
    assert everybody.fingerprint() != some.fingerprint()


def test_more_clients_than_there_are_is_refused(tmp_path: Path) -> None:
    parts = Parts(load_config(Experiment, experiment(tmp_path, evaluation={"clients": 13}), {}))
    with pytest.raises(ConfigError, match=r"evaluation\.clients is 13, but there are only 12 clients"):
        parts.check()


def test_clients_for_no_evaluation_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = experiment(tmp_path, evaluation={"clients": 5, "every": 3})
    Parts(load_config(Experiment, content, {})).check()
    assert "evaluation.clients=5: it is about evaluations before the last, and there is none" in caplog.text
    caplog.clear()
    Parts(load_config(Experiment, content, {"evaluation.every": 2})).check()
    assert "evaluation.clients" not in caplog.text


def test_reports_of_several_runs_say_it_of_all_of_them(run: Result, tmp_path: Path) -> None:
    one = load_run(str(run.path), METHODS)
    everybody = load_run(str(rayfl.run(experiment(tmp_path, evaluation={"every": 1})).path), METHODS)
    assert "of 5 or all clients" in drawn([everybody, one])
    assert not drawn([everybody])


def test_training_samples_are_scored_where_they_are_asked_for(run: Result, tmp_path: Path) -> None:
    options = {"every": 1, "clients": 5, "splits": ["train", "validation", "test"]}
    more = rayfl.run(experiment(tmp_path, evaluation=options))
    others = where(more.rounds, split="test")
    assert others.to_pylist() == where(run.rounds, split="test").to_pylist(), "no other row changes"
    owners = pq.read_table(f"{more.path}/partition.parquet", filters=[("split", "=", "train")])["client"].to_numpy()
    rows = where(more.clients, split="train", cohort="all", round=3, model="personalized").to_pylist()
    assert [row["n"] for row in rows] == np.bincount(owners).tolist()
    trained = where(more.rounds, split="train", cohort="selected", phase="trained").to_pylist()
    assert [row["round"] for row in trained] == [1, 2, 3]


@pytest.mark.slow
def test_the_member_of_a_sweep_that_validation_chose_is_scored_on_training_samples(tmp_path: Path) -> None:
    content = {**experiment(tmp_path), "algorithm": {"name": "superfed", "start": 0.1}}
    content["evaluation"] = {"splits": ["train", "validation"], "every": 3}
    result = rayfl.run(content)
    (best,) = where(result.rounds, split="train", cohort="all", model="lambda=best").to_pylist()
    assert (best["selected_on"], best["choice"][:7]) == ("validation", "lambda=")
    opened = load_run(str(result.path), METHODS)
    assert personalized_model(opened, 3) == best["choice"]
    with pytest.raises(RunError, match=r"come with evaluation\.splits=\[train,validation,test\]"):
        check_measured([load_run(str(rayfl.run(experiment(tmp_path, "no")).path), METHODS).viewed(Measured("train"))])


def test_nobody_is_judged_by_training_samples_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is judged by training samples: add test or validation"):
        load_config(Experiment, experiment(tmp_path), {"evaluation.splits": ["train"]})
    content = {**experiment(tmp_path, evaluation={"splits": ["train", "test"]}), "holdout": {"test": 0.0}}
    with pytest.raises(DataError, match="no client has a test sample, so that nobody would be evaluated") as caught:
        Parts(load_config(Experiment, content, {})).check()
    assert "set evaluation.splits" not in str(caught.value)
