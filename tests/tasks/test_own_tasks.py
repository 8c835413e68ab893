"""Tasks of a user's own, and options of tasks that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.config.loading import as_recorded, load_config
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.metrics import Measures, Metric
from rayfl.runs.rows import where
from rayfl.runs.summary import summary_table
from rayfl.tasks.base import Batch, NetworkTask
from rayfl.tasks.further_tasks import Regression


class Pinball(Regression):
    """Regression of the 0.9 quantile."""

    name = "pinball"

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        error = batch.y - outputs
        return batch.mean((0.9 * error).maximum(-0.1 * error).mean(-1))


def sections(**changes: Any) -> dict[str, Any]:
    return {
        "dataset": "diabetes",
        "partition": {"name": "iid", "num_clients": 5},
        "model": {"name": "two_nn", "hidden": [4]},
        "algorithm": "fedavg",
        "task": "regression",
        **changes,
    }


def test_a_task_of_a_users_own() -> None:
    config = load_config(Experiment, sections(task=f"{__name__}:Pinball"), {})
    task = Parts(config).task
    assert isinstance(task, Pinball)
    x, y = torch.randn(6, 10), torch.randn(6, 1)
    model = task.network.initialize(0)
    outputs = task.network.logits(model, x)
    error = y - outputs
    torch.testing.assert_close(task.loss(model, Batch(x, y)), torch.where(error > 0, 0.9 * error, -0.1 * error).mean())


def test_a_task_that_the_loss_alone_judges_has_tables_and_a_report(tmp_path: Path) -> None:
    content = sections(task=f"{__name__}:JudgedByLoss", train={"rounds": 2, "clients_per_round": 3})
    result = rayfl.run(content, **{"cluster.backend": "inline", "storage_path": str(tmp_path), "name": "run"})
    (row,) = where(result.rounds, round=2, cohort="all", split="test").to_pylist()
    losses = where(result.clients, round=2, cohort="all", split="test")["loss"].to_pylist()
    assert row["loss_worst5"] == pytest.approx(max(losses)) and 0 < row["loss_jain"] <= 1
    assert summary_table(result).row_count == 1
    done = CliRunner().invoke(app, ["report", result.path, "--out", str(tmp_path / "report")])
    assert done.exit_code == 0, done.exception


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": f"{__name__}:NoLossColumn"}, r"measures \(mse\) do not fit: none of them is called loss"),
        ({"task": f"{__name__}:ColumnTwice"}, r"'n' makes a column n, which tables have for something else"),
        ({"dataset": "digits"}, r"task: regression learns from numbers to predict, but dataset 'digits' has a class"),
        ({"task": "classification"}, r"but dataset 'diabetes' has numbers to predict: set task=regression"),
        (
            {"task": "segmentation"},
            r"segmentation learns from a class of each pixel, but dataset 'diabetes' has numbers to predict",
        ),
        ({"dataset": "synthetic_masks", "partition": "natural"}, r"a class of each pixel: set task=segmentation"),
        ({"task": "multilabel"}, r"multilabel learns from several labels of each sample"),
        ({"algorithm": "fedproto"}, r"fedproto cannot learn task=regression, which has not one class a sample: proto"),
        ({"algorithm": {"name": "fedphp", "transfer": "kd"}}, r"fedphp cannot learn .*transfer=kd distills"),
        ({"algorithm": {"name": "mapper", "space": "outputs"}}, r"mapper cannot learn .*space=outputs mixes prob"),
        ({"algorithm": "fedme", "train": {"clients_per_round": "all"}}, r"fedme cannot learn .*with mutual_learning "),
        ({"task": f"{__name__}:Nothing"}, r"does not define loss_of, measures"),
        ({"task": f"{__name__}:sections"}, r"is no subclass of rayfl.NetworkTask"),
        ({"noise": {"kind": "pair", "ratio": 0.2}}, r"noise: wrong labels are those of another class"),
        (
            {
                "task": {"name": "multilabel", "positive_weight": [1.0]},
                "dataset": "synthetic_labels",
                "partition": "natural",
            },
            r"task.positive_weight has 1 entries, but the data have 5 labels",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(changes: dict[str, Any], words: str) -> None:
    config = load_config(Experiment, sections(**changes), {})
    with pytest.raises(ConfigError, match=words):
        Parts(config).check()


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ({"name": "regression", "delta": 2.0}, "delta is for loss=huber"),
        ({"name": "classification", "thresholds": 11}, "thresholds is for auroc"),
        ({"name": "classification", "metrics": ["auroc", "auroc"]}, "'auroc' stands there twice"),
        ("regresion", "regression"),
    ],
)
def test_options_that_say_nothing_are_refused(task: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(Experiment, sections(task=task), {})


def test_classification_is_identified_as_before_there_were_tasks() -> None:
    plain = load_config(Experiment, "quickstart", [])
    assert "task" not in plain.identity()
    assert load_config(Experiment, "quickstart", ["task=classification"]).fingerprint() == plain.fingerprint()
    other = load_config(Experiment, "quickstart", ["task={name: classification, metrics: [auroc]}"])
    assert other.fingerprint() != plain.fingerprint()
    record = plain.model_dump(mode="json")
    old = {section: value for section, value in record.items() if section != "task"}
    assert as_recorded(old, lambda content, values: load_config(Experiment, content, values)) == plain


class SquaredAlone(Measures):
    """One metric, the loss: the mean of squared errors."""

    size = 2
    metrics = (Metric("loss", "loss", "lower"),)

    def statistics(self, predictions: Tensor, targets: Tensor) -> Tensor:
        errors = (predictions.double() - targets.double()).square()
        return torch.stack([torch.tensor(float(len(targets)), dtype=torch.float64), errors.mean(-1).sum()])

    def values(self, vectors: np.ndarray) -> dict[str, np.ndarray]:
        return {metric.name: vectors[..., 1] / vectors[..., 0] for metric in self.metrics}


class JudgedByLoss(Regression):
    """Regression that nothing but the loss judges."""

    name = "judged_by_loss"
    metrics = SquaredAlone.metrics
    measures = SquaredAlone()


class WithoutLoss(SquaredAlone):
    """No metric is called loss."""

    metrics = (Metric("mse", "MSE", "lower"),)


class Clashing(SquaredAlone):
    """A metric has the name of another column."""

    metrics = (Metric("loss", "loss", "lower"), Metric("n", "error", "lower"))


class NoLossColumn(Regression):
    """Its measures lack the loss."""

    name, measures = "no_loss_column", WithoutLoss()


class ColumnTwice(Regression):
    """Its measures have a name that is taken."""

    name, measures = "column_twice", Clashing()


class Nothing(NetworkTask):
    """Defines nothing."""


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            lambda vectors: {"loss": float(vectors.sum())},
            r"'loss' of sums of shape \(2, \d\) must be an array .* got float",
        ),
        (lambda vectors: {"loss": torch.ones(2)}, "got Tensor"),
        (lambda vectors: {"loss": np.ones(3)}, r"got shape \(3,\)"),
        (lambda vectors: {"losses": np.ones(2)}, "lacks the metric 'loss'"),
        (lambda vectors: None, "must return the metrics by name, got NoneType"),
        (lambda vectors: vectors.missing, "fails for sums that are 0, .*: AttributeError"),
    ],
)
def test_measures_that_make_no_metrics_are_refused_before_the_run(
    values: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(JudgedByLoss.measures), "values", lambda self, vectors: values(vectors))
    with pytest.raises(ConfigError, match=words):
        _ = Parts(load_config(Experiment, sections(task=f"{__name__}:JudgedByLoss"), {})).task
