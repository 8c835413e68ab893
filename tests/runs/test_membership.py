"""``rayfl membership``: whether losses tell which samples a run's models were trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.cli.outputs import OUTPUTS
from rayfl.errors import ConfigError
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import open_run
from rayfl.runs.membership import losses_of, summary


def experiment(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    """Half of the training labels are wrong, so that only who remembers a sample predicts its label."""
    return {
        "name": name,
        "storage_path": str(folder),
        "dataset": "digits",
        "partition": {"name": "iid", "num_clients": 4},
        "holdout": {"test": 0.3, "validation": 0.2},
        "noise": {"kind": "symmetric", "ratio": 0.5},
        "model": {"name": "two_nn", "hidden": [64, 64]},
        "algorithm": {"name": "ditto", "proximal_weight": 0.0},
        "train": {"rounds": 2, "clients_per_round": "all", "local_epochs": 60, "batch_size": 10, "lr": 0.2},
        "evaluation": {"every": 2},
        "tracking": {"tensorboard": False},
        "cluster": {"backend": "inline"},
        **more,
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("membership")
    rayfl.run(experiment(folder, "run", evaluation={"every": 2, "unseen_clients": 0.25}))
    return folder / "run"


def asked(run: Path, *options: Any) -> dict[str, Any]:
    found = CliRunner().invoke(app, ["membership", str(run), "--json", *map(str, options)])
    assert found.exit_code == 0, found.output
    answer: dict[str, Any] = json.loads(found.stdout)
    assert answer.keys() == {"schema", *OUTPUTS["membership"]}
    return answer


@pytest.mark.slow
def test_models_that_remember_wrong_labels_give_them_away(run: Path) -> None:
    found = asked(run)
    scores = found["scores"]
    assert (found["model"], found["others"], found["round"], scores["clients"]) == ("personalized", "test", 2, 3)
    assert scores["auc"] > 0.75 and scores["pooled_auc"] > 0.75 and scores["advantage"] > 0.4
    own = {one["client"]: one["auc"] for one in found["by_client"]}
    assert scores["most_exposed_auc"] == max(own.values()) == own[scores["most_exposed"]]
    sizes = CommittedModels(open_run(str(run), Experiment)).parts.dataset.sizes()
    assert [(one["members"], one["others"]) for one in found["by_client"]] == [tuple(row) for row in sizes[:3, [0, 2]]]


def test_models_that_were_not_trained_tell_nothing(tmp_path: Path) -> None:
    train = {"rounds": 1, "clients_per_round": "all", "local_epochs": 1, "batch_size": 10, "lr": 0}
    rayfl.run(experiment(tmp_path, "run", train=train, noise={"ratio": 0}))
    assert abs(asked(tmp_path / "run")["scores"]["pooled_auc"] - 0.5) < 0.06


@pytest.mark.slow
def test_losses_are_those_of_single_samples(run: Path) -> None:
    models = CommittedModels(open_run(str(run), Experiment))
    ((client, row, members, others),) = losses_of(models, "global", [1], "validation")
    assert (client, row) == (1, "global")
    (model,), network = models.predictor(1, "global").built(), models.parts.task.network
    for split, found in (("train", members), ("validation", others)):
        examples = models.parts.dataset.load(1)[split]
        expected = F.cross_entropy(network.logits(model, examples.x), examples.y, reduction="none").double()
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-6)


def test_fewer_samples_of_chosen_clients(run: Path) -> None:
    found = asked(run, "--client", 2, "--client", 0, "--samples", 7, "--others", "validation")
    assert [(one["client"], one["members"], one["others"]) for one in found["by_client"]] == [(2, 7, 7), (0, 7, 7)]
    assert asked(run, "--client", 2, "--client", 0, "--samples", 7, "--others", "validation") == found
    text = CliRunner().invoke(app, ["membership", str(run), "--client", "2"])
    assert text.exit_code == 0 and "of 1 client that were trained on" in text.stdout, text.output
    assert "most exposed: client 2, AUC" in text.stdout
    assert "training labels have noise (noise.ratio=0.5) and others have not" in text.stderr


def test_who_was_in_no_round_has_no_members(tmp_path: Path) -> None:
    train = {"rounds": 1, "clients_per_round": 2, "local_epochs": 1, "batch_size": 10, "lr": 0.1}
    rayfl.run(experiment(tmp_path, "run", train=train, noise={"ratio": 0}, evaluation={"every": 1}))
    models = CommittedModels(open_run(str(tmp_path / "run"), Experiment))
    took_part = models.parts.cohort(0)
    found = CliRunner().invoke(app, ["membership", str(tmp_path / "run"), "--json"])
    assert [one["client"] for one in json.loads(found.stdout)["by_client"]] == sorted(took_part)
    assert "2 of 4 clients had been in no round" in found.stderr
    (idle, *_) = set(range(4)) - set(took_part)
    with pytest.raises(ConfigError, match=f"client {idle} has taken part in no round"):
        list(losses_of(models, clients=[idle]))


def test_what_has_no_answer_is_refused(run: Path, tmp_path: Path) -> None:
    for options, message in ((["--client", "3"], "was held out from training"), (["--client", "9"], "no client 9")):
        found = CliRunner().invoke(app, ["membership", str(run), *options])
        assert isinstance(found.exception, ConfigError) and message in str(found.exception)
    survival = {
        "dataset": {"name": "synthetic_survival", "num_clients": 3, "samples": 30, "dimension": 4},
        "task": "survival", "noise": {"ratio": 0}, "partition": "natural",
    }  # fmt: skip
    train = {"rounds": 1, "clients_per_round": "all", "local_epochs": 1, "batch_size": 10, "lr": 0.01}
    rayfl.run(experiment(tmp_path, "survival", train=train, evaluation={"every": 1}, **survival))
    models = CommittedModels(open_run(str(tmp_path / "survival"), Experiment))
    with pytest.raises(ConfigError, match=r"task=survival compares samples with each other"):
        list(losses_of(models))


@pytest.mark.slow
def test_a_texts_loss_is_a_mean_over_its_tokens(tmp_path: Path) -> None:
    texts = {
        "dataset": {"name": "synthetic_text", "num_clients": 3, "texts": 30, "length": 8, "vocabulary": 9},
        "task": "language_model", "partition": "natural", "noise": {"ratio": 0},
        "model": {"name": "window_lm", "embedding": 8, "hidden": 64},
    }  # fmt: skip
    rayfl.run(experiment(tmp_path, "texts", **texts))
    scores = summary(list(losses_of(CommittedModels(open_run(str(tmp_path / "texts"), Experiment)))))
    assert scores["clients"] == 3 and scores["auc"] > 0.6
