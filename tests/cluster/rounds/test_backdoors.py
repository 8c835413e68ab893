"""Runs with a backdoor: whom it fools, where its success is in tables and reports, and what leaves it as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import rayfl
from algorithms.registry import METHODS, Experiment
from cluster.rounds.forking import fork
from rayfl.cli.entry import app
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.experiment.result import Result
from rayfl.report.protocol import message_settings
from rayfl.results.schemas import metrics_of
from rayfl.runs.committed import CommittedModels
from rayfl.runs.finding import load_run
from rayfl.runs.folder import open_run
from rayfl.runs.rows import where
from tests.support.experiments import Interrupt, assert_same, outcome

TARGET = 3
BACKDOOR = {"target": TARGET, "poisoned": 0.5, "patch": 3}
SCALED = {"clients": [1, 4], "backdoor": BACKDOOR, "message": "scaled", "strength": 6}


def experiment(folder: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    """Twelve clients of digits that all take part, two of them malicious."""
    content = {
        "name": name,
        "storage_path": str(folder),
        "dataset": {"name": "digits"},
        "partition": {"name": "iid", "num_clients": 12},
        "model": {"name": "two_nn", "hidden": [16]},
        "algorithm": {"name": "fedavg"},
        "train": {"rounds": 8, "clients_per_round": "all", "local_epochs": 3, "lr": 0.2, "batch_size": 16},
        "attack": SCALED,
        "evaluation": {"every": 4},
        "tracking": {"tensorboard": False},
        "cluster": {"backend": "inline"},
    }
    train = {**content["train"], **changes.pop("train", {})}
    return {**content, **changes, "train": train}


def last(run: Result, **chosen: Any) -> Mapping[str, Any]:
    rows = where(run.rounds, cohort="all", round=run.rounds_completed, **{"split": "test", **chosen}).to_pylist()
    assert len(rows) == 1
    return dict(rows[0])


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return rayfl.run(experiment(tmp_path_factory.mktemp("runs")))


@pytest.fixture(scope="module")
def robust(tmp_path_factory: pytest.TempPathFactory) -> Result:
    rule = {"name": "krum", "malicious": 2, "kept": 8}
    return rayfl.run(experiment(tmp_path_factory.mktemp("runs"), "robust", aggregator=rule))


@pytest.mark.slow
def test_a_scaled_backdoor_takes_the_mean_and_not_a_robust_rule(
    attacked: Result, robust: Result, tmp_path: Path
) -> None:
    nobody = rayfl.run(experiment(tmp_path, "nobody", attack={}))
    assert last(attacked, model="global")["asr"] > 0.95 and last(attacked, model="global")["top1"] > 0.8
    assert last(robust, model="global")["asr"] < 0.2 and last(robust, model="global")["top1"] > 0.8
    assert "asr" not in nobody.rounds.column_names and last(nobody, model="global")["top1"] > 0.8


def test_the_rate_in_tables_is_that_of_a_plain_computation(attacked: Result) -> None:
    models = CommittedModels(open_run(attacked.path, Experiment))
    honest = Parts(load_config(Experiment, {**experiment(Path(attacked.path).parent), "attack": {}}, {})).dataset
    fooled, counts = [], []
    for client in sorted(set(range(12)) - {1, 4}):
        test = honest.load(client)["test"]
        x = test.x[test.y != TARGET].clone()
        x[:, :, -3:, -3:] = 1
        (model,) = models.predictor(client, "global").built()
        layers = [name.removesuffix(".weight") for name in model if name.endswith(".weight")]
        found = x.flatten(1)
        for place, layer in enumerate(layers):
            found = found @ model[f"{layer}.weight"].T + model[f"{layer}.bias"]
            found = found.relu() if place < len(layers) - 1 else found
        hits = (found.argmax(1) == TARGET).double()
        (row,) = where(attacked.clients, client=client, split="test", model="global", round=8, cohort="all").to_pylist()
        assert row["asr"] == pytest.approx(float(hits.mean())) and row["n"] == len(test)
        fooled.append(float(hits.sum()))
        counts.append(len(x))
    summary, shares = last(attacked, model="global"), np.divide(fooled, counts)
    assert summary["asr"] == pytest.approx(shares.mean()) and summary["asr_std"] == pytest.approx(shares.std())
    assert summary["pooled_asr"] == pytest.approx(sum(fooled) / sum(counts)) and summary["clients"] == 10
    for split in ("validation", "train"):
        assert not any(row["asr"] is not None for row in where(attacked.rounds, split=split).to_pylist())
    cohort = where(attacked.rounds, cohort="selected", phase="trained", split="test").to_pylist()
    assert cohort and all(row["asr"] is not None for row in cohort)


@pytest.mark.slow
def test_lists_and_reports_have_the_rate(attacked: Result, robust: Result, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    for command in (
        ["clients", attacked.path],
        ["compare", attacked.path, robust.path, "--metric", "asr"],
        ["report", attacked.path, robust.path, "--out", str(folder)],
    ):
        said = CliRunner().invoke(app, command, env={"COLUMNS": "250"})
        assert said.exit_code == 0, said.exception
        shown = said.output if command[0] != "report" else next(folder.glob("*.html")).read_text(encoding="utf-8")
        # a terminal has room for lines of two words
        assert (" asr " if command[0] == "clients" else "attack success") in " ".join(shown.split()), shown[:5000]
    (metric,) = (one for one in metrics_of(attacked.rounds) if one.name == "asr")
    assert metric.sign == -1 and metric.told(0.5) == "50.00%"
    said = message_settings(load_run(attacked.path, METHODS))
    assert said == "malicious clients [1, 4], a backdoor to class 3, in 0.5 of their samples, their messages scaled"


@pytest.mark.slow
def test_a_killed_run_of_a_sweeping_method_has_the_same_bits(tmp_path: Path) -> None:
    changes = {
        "algorithm": {"name": "superfed", "mode": "mm", "start": 0.5},
        "attack": {"share": 0.25, "backdoor": {**BACKDOOR, "parts": 2}},
        "evaluation": {"every": 1, "unseen_clients": 0.2},
        "train": {"rounds": 3, "local_epochs": 1},
    }
    whole = rayfl.run(experiment(tmp_path, "whole", **changes))
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(experiment(tmp_path, "parts", **changes), callbacks=[Interrupt(2)])
    rayfl.run(experiment(tmp_path, "parts", **changes))
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "parts"))
    rows = where(whole.rounds, cohort="all", split="test", round=3).to_pylist()
    assert len(rows) > 5 and all(row["asr"] is not None for row in rows), "global, every point of the grid, the choices"
    assert all(row["asr"] is not None for row in where(whole.rounds, cohort="unseen", split="test").to_pylist())


def test_texts_are_backdoored_looped_and_stacked(tmp_path: Path) -> None:
    changes = {
        "dataset": "tests.support.own_data:texts",
        "partition": "natural",
        "model": {"name": "fasttext", "embedding": 8},
        "attack": {"clients": [1], "backdoor": {"target": 0, "tokens": [7, 7, 7], "poisoned": 1}},
    }
    looped, stacked = (
        rayfl.run(experiment(tmp_path, mode, **changes, engine={"mode": mode})) for mode in ("looped", "vectorized")
    )
    for name in ("asr", "top1"):
        one, other = (np.array(run.clients[name]).astype(float) for run in (looped, stacked))
        np.testing.assert_allclose(one, other, atol=0.05)
    assert 0 <= last(looped, model="global")["asr"] <= 1


def test_the_official_test_part_is_scored_too(tmp_path: Path) -> None:
    from tests.data.sources.test_official_test import settings

    attack = {"clients": [1], "backdoor": {"target": 0, "columns": {0: 3, 5: 3}}}
    content = settings(tmp_path, attack=attack, evaluation={"official_test": True, "official_personalized": True})
    run = rayfl.run({**content, "algorithm": "ditto", "cluster": {"backend": "inline"}})
    official = where(run.rounds, split="official").to_pylist()
    assert {row["cohort"] for row in official} == {"server", "all"}
    assert all(row["asr"] is not None for row in official)


def test_samples_of_other_kinds_are_refused_before_anything_starts(tmp_path: Path) -> None:
    content = {
        "dataset": "diabetes",
        "task": "regression",
        "partition": {"name": "iid", "num_clients": 4},
        "model": "two_nn",
        "algorithm": "fedavg",
        "train": {"clients_per_round": 2},
        "attack": {"clients": [0], "backdoor": {"target": 0}},
        "storage_path": str(tmp_path),
    }
    with pytest.raises(ConfigError, match=r"attack\.backdoor: .* no class of their own \(values\)"):
        Parts(load_config(Experiment, content, {})).check()


def test_runs_without_a_backdoor_keep_their_fingerprint(tmp_path: Path) -> None:
    labels = {"clients": [1, 4], "labels": "random"}
    plain, attacked, other = (
        load_config(Experiment, experiment(tmp_path, attack=one), {}) for one in ({}, labels, SCALED)
    )
    assert "attack" not in plain.identity() and "backdoor" not in attacked.identity()["attack"]
    assert len({plain.fingerprint(), attacked.fingerprint(), other.fingerprint()}) == 3
    torch.testing.assert_close(*(Parts(one).dataset.load(1)["train"].x for one in (plain, attacked)), rtol=0, atol=0)


def test_a_fork_keeps_the_columns_of_its_tables(tmp_path: Path) -> None:
    short = {"rounds": 1, "local_epochs": 1}
    none = {"share": 0, "clients": None, "backdoor": None, "message": "honest", "strength": None}
    of_attacked = rayfl.run(experiment(tmp_path, "attacked", train=short)).path
    of_honest = rayfl.run(experiment(tmp_path, "honest", train=short, attack={})).path
    for path, attack in ((of_attacked, none), (of_honest, SCALED)):
        with pytest.raises(ConfigError, match=r"^attack\.backdoor: a fork goes on with"):
            fork(
                path, "other", None, {"train.rounds": 2, **{f"attack.{name}": value for name, value in attack.items()}}
            )
    fork(of_attacked, "target", None, {"train.rounds": 2, "attack.backdoor.target": TARGET + 1})
    rows = where(rayfl.run(tmp_path / "target").rounds, model="global", cohort="all", split="test").to_pylist()
    assert [(row["round"], row["asr"] is None) for row in rows] == [(1, False), (2, False)]
