"""The losses of all tasks, alone and in padded stacks, what several models predict together, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.config.loading import as_recorded, load_config
from rayfl.engine.classification import Classification
from rayfl.engine.further_tasks import ErrorLoss, LanguageModel, Multilabel, Regression, Segmentation
from rayfl.engine.tasks import Batch, NetworkTask, Predictor
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts
from rayfl.metrics import Measures, Metric
from rayfl.metrics.language import IGNORED
from rayfl.models.perceptron import TwoNN
from rayfl.models.tokens import FastText, WindowModel
from rayfl.models.unet import UNetModel
from rayfl.runs.rows import where
from rayfl.runs.summary import summary_table

N, OUTPUTS, LENGTH, TOKENS = 7, 3, 5, 6


def made(task: str) -> tuple[NetworkTask, Tensor, Tensor]:
    """A task on a small network, inputs and targets."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator)
    if task == "language_model":
        spec = InputSpec("tokens", (LENGTH,), TOKENS, TOKENS, "tokens")
        text = torch.randint(1, TOKENS, (N, LENGTH + 1), generator=generator)
        y = text[:, 1:].clone()
        y[2, 3:] = IGNORED
        return LanguageModel(WindowModel(embedding=3, hidden=4).network(spec), (), spec), text[:, :-1], y
    if task == "segmentation":
        spec = InputSpec("image", (1, 4, 5), OUTPUTS, target="mask")
        masks = torch.randint(OUTPUTS, (N, 4, 5), generator=generator)
        masks[1, :2] = IGNORED
        images = torch.randn(N, 1, 4, 5, generator=generator)
        return Segmentation(UNetModel(width=2, depth=1).network(spec), (), spec), images, masks
    target: Any = {"regression": "values", "multilabel": "labels"}[task]
    spec = InputSpec("image", (4,), OUTPUTS, target=target)
    network = TwoNN(hidden=(5,)).network(spec)
    if task == "regression":
        return Regression(network, (), spec), x, torch.randn(N, OUTPUTS, generator=generator)
    return Multilabel(network, (), spec), x, (torch.rand(N, OUTPUTS, generator=generator) < 0.5).float()


TASKS = ("regression", "multilabel", "language_model", "segmentation")


@pytest.mark.parametrize("task", TASKS)
def test_losses_are_those_of_pytorch(task: str) -> None:
    learned, x, y = made(task)
    model = learned.network.initialize(0)
    outputs = learned.network.logits(model, x)
    expected = {
        "regression": lambda: F.mse_loss(outputs, y),
        "multilabel": lambda: F.binary_cross_entropy_with_logits(outputs, y),
        "language_model": lambda: F.cross_entropy(outputs.flatten(0, 1), y.flatten(), ignore_index=IGNORED),
        "segmentation": lambda: learned.measures.values(
            learned.measures.statistics(outputs.log_softmax(-1), y).detach().numpy()
        )["loss"],
    }[task]()
    torch.testing.assert_close(learned.loss(model, Batch(x, y)), torch.as_tensor(expected, dtype=torch.float32))
    assert not isinstance(learned, Classification)


@pytest.mark.parametrize(
    ("error", "reference"),
    [
        (ErrorLoss("squared"), F.mse_loss),
        (ErrorLoss("absolute"), F.l1_loss),
        (ErrorLoss("huber", 0.7), partial(F.huber_loss, delta=0.7)),
    ],
)
def test_losses_of_numbers(error: ErrorLoss, reference: Callable[..., Tensor]) -> None:
    plain, x, y = made("regression")
    learned = Regression(plain.network, (), plain.spec, error)
    outputs = learned.network.logits(learned.network.initialize(0), x)
    torch.testing.assert_close(learned.loss_of(outputs, Batch(x, y)), reference(outputs, y))
    statistics = learned.measures.statistics(outputs, y).numpy()
    assert float(learned.measures.values(statistics)["loss"]) == pytest.approx(float(reference(outputs, y)), rel=1e-5)


def test_positive_weights() -> None:
    plain, x, y = made("multilabel")
    learned = Multilabel(plain.network, (), plain.spec, (1.0, 2.0, 5.0))
    outputs = learned.network.logits(learned.network.initialize(0), x)
    expected = F.binary_cross_entropy_with_logits(outputs, y, pos_weight=torch.tensor([1.0, 2.0, 5.0]))
    torch.testing.assert_close(learned.loss_of(outputs, Batch(x, y)), expected)


@pytest.mark.parametrize("task", TASKS)
def test_padding_changes_no_loss_and_no_gradient_also_under_vmap(task: str) -> None:
    learned, x, y = made(task)
    sizes, models = (N, 4), [learned.network.initialize(seed) for seed in (0, 1)]
    masks = torch.stack([(torch.arange(N) < size).float() for size in sizes])
    padded = [torch.cat([part[:size], part[:1].expand(N - size, *part.shape[1:])]) for part in (x, y) for size in sizes]
    stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}

    def loss(model: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return learned.loss(model, Batch(x, y, mask))

    found = vmap(grad(loss))(stacked, torch.stack(padded[:2]), torch.stack(padded[2:]), masks)
    for place, size in enumerate(sizes):
        expected = grad(lambda model, n=size: learned.loss(model, Batch(x[:n], y[:n])))(models[place])
        for name, value in expected.items():
            torch.testing.assert_close(found[name][place], value, rtol=1e-4, atol=1e-6)


def test_a_text_in_which_no_position_counts_has_no_loss() -> None:
    learned, x, y = made("language_model")
    assert float(learned.loss(learned.network.initialize(0), Batch(x, torch.full_like(y, IGNORED)))) == 0


@pytest.mark.parametrize("task", TASKS)
def test_several_models_predict_their_mean(task: str) -> None:
    learned, x, _ = made(task)
    models = [learned.network.initialize(seed) for seed in range(3)]
    found = Predictor.of(*models).predictions(models, x, learned)
    outputs = torch.stack([learned.network.logits(model, x) for model in models])
    expected = {
        "regression": lambda: outputs.mean(0),
        "multilabel": lambda: outputs.sigmoid().mean(0).logit(),
        "language_model": lambda: outputs.softmax(-1).mean(0).log(),
        "segmentation": lambda: outputs.softmax(-1).mean(0).log(),
    }[task]()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_padding_is_no_part_of_a_text() -> None:
    spec = InputSpec("tokens", (6,), 2, 9, padding=0)
    network = FastText(embedding=4).network(spec)
    model = network.initialize(0)
    text = torch.tensor([[3, 5, 0, 0, 0, 0], [5, 3, 3, 5, 0, 0]])
    first, second = network.features(model, text)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first, model["embedding.weight"][[3, 5]].mean(0))


def test_a_window_of_one_reads_its_own_token_alone() -> None:
    learned, x, _ = made("language_model")
    assert learned.spec is not None
    network = WindowModel(window=1, embedding=3, hidden=4).network(learned.spec)
    logits = network.logits(network.initialize(0), x)
    same = x[0, 1] == x
    assert torch.allclose(logits[same], logits[0, 1].expand(int(same.sum()), -1))


def test_a_window_reads_no_token_that_comes_later() -> None:
    learned, x, _ = made("language_model")
    model, other = learned.network.initialize(0), x.clone()
    other[:, 3] = x[:, 3] % (TOKENS - 1) + 1
    before, after = (learned.network.logits(model, tokens) for tokens in (x, other))
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3], after[:, 3])


class Pinball(Regression):
    """Regression of the 0.9 quantile."""

    name = "pinball"

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        error = batch.y - outputs
        return batch.mean((0.9 * error).maximum(-0.1 * error).mean(-1))


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
        ({"task": f"{__name__}:Nothing"}, r"does not define loss_of, measures"),
        ({"task": f"{__name__}:N"}, r"is no subclass of rayfl.NetworkTask"),
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
        ({"name": "classification", "metrics": ["auroc", "auroc"]}, "has a metric twice"),
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
