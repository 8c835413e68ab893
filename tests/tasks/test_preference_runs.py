"""Runs that align language models: looped and stacked, through a stop, private, attacked, and what is refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.errors import ConfigError
from rayfl.examples import BYTE_TOKENS
from rayfl.experiment.parts import Parts
from rayfl.results.schemas import metrics_of
from rayfl.runs.answers import answered
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import open_run
from rayfl.runs.membership import losses_of
from rayfl.runs.rows import where
from rayfl.tasks.base import Predictor
from rayfl.tasks.generation import prompts_of
from tests.support.bases import write_base
from tests.support.experiments import Interrupt, outcome
from tests.support.toys import assert_close, assert_equal

torch.set_num_threads(1)


@cache
def wide() -> str:
    """A small language model with a token for each byte."""
    folder = TemporaryDirectory(prefix="rayfl-wide-")
    _FOLDERS.append(folder)
    return str(write_base("llama", Path(folder.name) / "base", causal=True, vocabulary=BYTE_TOKENS))


_FOLDERS: list[TemporaryDirectory[str]] = []
"""They are removed when the process ends."""


def experiment(folder: Path, name: str, method: Any, **sections: Any) -> dict[str, Any]:
    """Five clients of made-up pairs, two rounds of three, in this process."""
    return {
        "name": name,
        "storage_path": str(folder),
        "task": "preference",
        "dataset": {"name": "synthetic_preferences", "num_clients": 5, "samples": 14, "things": 4},
        "holdout": {"test": 0.3, "validation": 0.2},
        "model": {
            "name": "pretrained", "folder": wide(), "adapter": {"r": 2, "alpha": 4}, "head": {"train": False},
        },
        "algorithm": method,
        "train": {
            "rounds": 2, "clients_per_round": 3, "local_epochs": 1, "batch_size": 3, "lr": 0.02, "optimizer": "sgd",
            **sections.pop("train", {}),
        },
        "evaluation": {"every": 2},
        "tracking": {"tensorboard": False},
        "cluster": {"backend": "inline"},
        **sections,
    }  # fmt: skip


METHODS: dict[str, Any] = {
    "FedAvg": "fedavg",
    "FedSA-LoRA": {"name": "fedper", "head_group": "lora_b"},
    "Ditto": "ditto",
    "SCAFFOLD": "scaffold",
    "FedProx": {"name": "fedprox", "proximal_weight": 0.1},
    "FedDPA": {"name": "feddpa", "local_epochs": 1},
    "FedALT": "fedalt",
    "APFL": "apfl",
}
QUICK = ("FedSA-LoRA",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS]
)
def test_runs_of_looped_and_of_stacked_clients_agree(name: str, tmp_path: Path) -> None:
    runs = {
        mode: rayfl.run(experiment(tmp_path, mode, METHODS[name], engine={"mode": mode}))
        for mode in ("looped", "vectorized")
    }
    assert [metric.name for metric in metrics_of(runs["looped"].rounds)] == ["preference_accuracy", "margin", "loss"]
    one, other = outcome(tmp_path / "looped"), outcome(tmp_path / "vectorized")
    assert_close(one.server, other.server, 1e-5)
    for client in one.states:
        assert_close(one.states[client], other.states[client], 1e-5)
    rows = [where(run.clients, round=2, cohort="all", split="test").to_pylist() for run in runs.values()]
    for row, its in zip(*rows, strict=True):
        assert row["loss"] == pytest.approx(its["loss"], abs=1e-4)
        assert row["margin"] == pytest.approx(its["margin"], abs=1e-4)


@pytest.mark.parametrize("loss", ["orpo", *(pytest.param(loss, marks=pytest.mark.slow) for loss in ("ipo", "simpo"))])
@pytest.mark.slow
def test_a_run_with_each_loss_lowers_it(loss: str, tmp_path: Path) -> None:
    content = experiment(
        tmp_path, "run", "fedavg", task={"name": "preference", "loss": loss},
        train={"rounds": 4, "lr": 0.01, "optimizer": "adamw"}, evaluation={"every": 4, "splits": ["train"]},
    )  # fmt: skip
    content["dataset"]["own"] = 0
    content["evaluation"] = {"every": 4}
    result = rayfl.run(content)
    parts = Parts(load_config(Experiment, content, {}))
    start = parts.task.network.initialize(parts.streams.integer("init.global"))
    data = parts.dataset.load(0)["test"]
    before = evaluate({"start": Predictor.of(start)}, data, parts.task, 100)["start"].metrics()
    row = where(result.clients, round=4, cohort="all", split="test", client=0).to_pylist()[0]
    assert row["loss"] < before["loss"] and row["preference_accuracy"] > 0.5


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "whole", METHODS["FedSA-LoRA"]))
    stopped = experiment(tmp_path, "stopped", METHODS["FedSA-LoRA"])
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(stopped, callbacks=[Interrupt(1)])
    rayfl.run(stopped)
    one, other = outcome(tmp_path / "whole"), outcome(tmp_path / "stopped")
    assert_equal(one.server, other.server)
    for client in one.states:
        assert_equal(one.states[client], other.states[client])


@pytest.mark.slow
def test_single_pairs_have_losses_for_an_attacker_and_prompts_answers(tmp_path: Path) -> None:
    """The attacker of memberships has each pair's loss; of answers the preferred ones are the references."""
    result = rayfl.run(experiment(tmp_path, "run", METHODS["FedSA-LoRA"]))
    models = CommittedModels(open_run(str(tmp_path / "run"), Experiment))
    for client, row, members, others in losses_of(models):
        scored = where(result.clients, round=2, cohort="all", split="test", client=client, model=row).to_pylist()
        assert others.shape == (scored[0]["n"],) and others.mean() == pytest.approx(scored[0]["loss"], abs=1e-5)
        assert np.isfinite(members).all() and len(members) == 8
    for client, found in answered(models, most=4):
        pairs = models.parts.dataset.load(client)["test"]
        asked = [prompts_of(x[0], y[0])[0] for x, y in zip(pairs.x, pairs.y, strict=True)]
        decoder = models.run.config.dataset.decoder()
        assert [one.reference for one in found] == [decoder.text(one.response) for one in asked]
        assert all(1 <= one.tokens <= 4 for one in found)


@pytest.mark.slow
def test_pairs_can_be_private_samples(tmp_path: Path) -> None:
    private = {"example_clip_norm": 0.1, "example_noise_multiplier": 0.5, "example_delta": 1e-3}
    for mode in ("looped", "vectorized"):
        rayfl.run(experiment(tmp_path, mode, "fedavg", privacy=private, engine={"mode": mode}))
    one, other = outcome(tmp_path / "looped"), outcome(tmp_path / "vectorized")
    assert_close(one.server, other.server, 1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "language_model"}, r"dataset 'synthetic_preferences' has which of two .*set task=preference"),
        ({"dataset": "synthetic_instructions"}, r"preference learns from which of two answers .*task=language_model"),
        ({"model": {"name": "char_lstm"}}, r"preference aligns a pretrained language model: set model.name=pretrained"),
        ({"algorithm": "fedproto"}, r"fedproto cannot learn task=preference, which has not one class a sample"),
        ({"algorithm": {"name": "fedavg", "aggregation": "tokens"}}, r"task=preference predicts none"),
        ({"attack": {"share": 0.4, "labels": "flipped"}}, r"these samples have no class of their own \(preference\)"),
        (
            {"attack": {"share": 0.4, "backdoor": {"target": 0, "tokens": [3, 4]}}},
            r"attack.backdoor: samples with the trigger are to be taken for a class, and these .* \(preference\)",
        ),
        ({"noise": {"kind": "pair", "ratio": 0.2}}, r"noise: wrong labels are those of another class"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        Parts(load_config(Experiment, {**experiment(tmp_path, "run", "fedavg"), **changes}, {})).check()


def test_data_without_pairs_are_refused(tmp_path: Path) -> None:
    content = {
        **experiment(tmp_path, "run", "fedavg"),
        "dataset": {"name": "parquet", "path": str(tmp_path / "no.parquet")},
    }
    with pytest.raises(rayfl.RayflError, match=r"pairs of a preferred and another answer are read by dataset=pref"):
        Parts(load_config(Experiment, content, {})).check()
