"""Anomaly detection: losses and steps by hand, what is learned of, scores, refusals, and runs in both modes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import roc_auc_score

import rayfl
from algorithms.parts.mixed_outputs import mixing
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, DataError, ModelError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.networks.decoding import decoding
from rayfl.params import Tree
from rayfl.tasks.anomaly import AnomalyDetection
from rayfl.tasks.base import Batch, Predictor
from tests.support.experiments import Interrupt, assert_equal, outcome
from tests.support.toys import assert_close

torch.set_num_threads(1)
NORMAL = [1, 2, 3]


def experiment(folder: Path | None = None, name: str = "run", **changes: Any) -> dict[str, Any]:
    where = {} if folder is None else {"storage_path": str(folder), "name": name}
    return {
        **where,
        "dataset": "digits",
        "partition": {"name": "iid", "num_clients": 4},
        "holdout": {"test": 0.3, "validation": 0.2, "public": 800},
        "task": {"name": "anomaly_detection", "normal": NORMAL, "decoder": [7]},
        "model": {"name": "two_nn", "hidden": [9, 5]},
        "algorithm": {"name": "fedavg"},
        "train": {"rounds": 3, "clients_per_round": 3, "local_epochs": 2, "batch_size": 8, "lr": 0.5, "momentum": 0.5},
        "cluster": {"backend": "inline", "device": "cpu"},
        "tracking": {"tensorboard": False},
        **changes,
    }


def parts_of(**changes: Any) -> Parts:
    parts = Parts(load_config(Experiment, experiment(**changes), {}))
    parts.check()
    return parts


def task_of(**options: Any) -> AnomalyDetection:
    task = {"name": "anomaly_detection", "normal": NORMAL, "decoder": [7], **options}
    found = parts_of(task=task).task
    assert isinstance(found, AnomalyDetection)
    return found


def outputs(model: Tree, x: torch.Tensor) -> torch.Tensor:
    """The autoencoder by hand: four linear layers, in the order of the model."""
    leaves = list(model.values())
    assert [leaf.dim() for leaf in leaves] == [2, 1] * 4
    for place in (0, 2, 4):
        x = torch.relu(x @ leaves[place].T + leaves[place + 1])
    return x @ leaves[6].T + leaves[7]


def samples(seed: int = 0, n: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(n, 1, 8, 8, generator=generator), torch.arange(n) % 6)


def test_the_network_is_an_autoencoder_of_its_model() -> None:
    network = task_of().network
    shapes = {name: tuple(leaf.shape) for name, leaf in network.initialize(0).items()}
    assert shapes["decoder.0.weight"] == (7, 5) and shapes["decoder.2.weight"] == (64, 7)
    assert [name for name in shapes if name.startswith("encoder.")] == list(shapes)[:4]
    assert set(network.head_names) == {"decoder.2.weight", "decoder.2.bias"}
    assert set(network.classifier_names) == {name for name in shapes if name.startswith("decoder.")}
    assert tuple(network.features(network.initialize(0), samples().x).shape) == (12, 5)
    narrow = task_of(decoder=[]).network
    assert set(narrow.head_names) == {"decoder.0.weight", "decoder.0.bias"}


@pytest.mark.parametrize("trains", ["normal", "all"])
def test_inv_anomaly_1_loss_and_gradient_are_those_of_plain_pytorch(trains: str) -> None:
    task, batch = task_of(trains=trains), samples()
    model = {name: leaf.double().requires_grad_() for name, leaf in task.network.initialize(0).items()}
    batch = Batch(batch.x.double(), batch.y)
    errors = ((outputs(model, batch.x.flatten(1)) - batch.x.flatten(1)) ** 2).mean(1)
    counts = torch.isin(batch.y, torch.tensor(NORMAL)) if trains == "normal" else torch.ones(12, dtype=torch.bool)
    expected = (errors * counts).sum() / 12
    found = task.loss(model, batch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    slopes = [torch.autograd.grad(one, list(model.values()), retain_graph=True) for one in (expected, found)]
    for one, other in zip(*slopes, strict=True):
        assert_close(one, other, 1e-14)
    padded = Batch(torch.cat([batch.x, batch.x[:3] * 7]), torch.cat([batch.y, batch.y[:3]]), torch.arange(15) < 12)
    padded = Batch(padded.x, padded.y, padded.mask.double())  # type: ignore[union-attr]
    assert task.loss(model, padded).item() == pytest.approx(expected.item(), rel=1e-12)


def test_inv_anomaly_2_nothing_is_learned_of_anomalies() -> None:
    """Their inputs may be anything."""
    task, batch = task_of(), samples()
    model = {name: leaf.requires_grad_() for name, leaf in task.network.initialize(0).items()}
    strange = batch.x.where(torch.isin(batch.y, torch.tensor(NORMAL))[:, None, None, None], 99.0)
    slopes = [
        torch.autograd.grad(task.loss(model, Batch(x, batch.y)), list(model.values())) for x in (batch.x, strange)
    ]
    for one, other in zip(*slopes, strict=True):
        assert torch.equal(one, other)


def test_several_models_have_the_error_of_their_mean_output() -> None:
    task, batch = task_of(), samples()
    models = [task.network.initialize(seed) for seed in range(3)]
    mean = torch.stack([outputs(model, batch.x.flatten(1)) for model in models]).mean(0)
    expected = ((mean - batch.x.flatten(1)) ** 2).mean(1, keepdim=True)
    assert_close(Predictor.of(*models).predictions(models, batch.x, task), expected, 1e-6)
    mixed = mixing(models[0], models[1], 0.25)
    half = 0.75 * outputs(models[0], batch.x.flatten(1)) + 0.25 * outputs(models[1], batch.x.flatten(1))
    errors = ((half - batch.x.flatten(1)) ** 2).mean(1, keepdim=True)
    assert_close(mixed.predictions(mixed.built(), batch.x, task), errors, 1e-6)
    stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    each = task.stacked_predictions(stacked, batch.x.expand(3, *batch.x.shape))
    for place, model in enumerate(models):
        assert_close(each[place], task.predictions([model], batch.x), 1e-6)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_a_run_is_scored_as_scikit_learn_scores_it(tmp_path: Path, mode: str) -> None:
    content = experiment(tmp_path, engine={"mode": mode})
    rayfl.run(content)
    model = outcome(tmp_path / "run").server["model"]
    table = pq.read_table(tmp_path / "run" / "clients.parquet").to_pylist()
    rows = {one["client"]: one for one in table if one["round"] == 3 and one["split"] == "test"}
    parts = Parts(load_config(Experiment, content, {}))
    assert set(rows) == {0, 1, 2, 3}
    for client, one in rows.items():
        part = parts.dataset.load(client)["test"]
        x = (part.x.float() / 255 if part.x.dtype == torch.uint8 else part.x).flatten(1)
        errors, usual = ((outputs(model, x) - x) ** 2).mean(1), np.isin(part.y.numpy(), NORMAL)
        assert one["auroc"] == pytest.approx(roc_auc_score(~usual, errors.numpy()))
        assert one["error"] == pytest.approx(float(errors[usual].mean()), rel=1e-6)
        assert one["loss"] == pytest.approx(float(errors[usual].sum()) / len(errors), rel=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto", "superfed", "fedcp"])
def test_looped_and_stacked_runs_agree(tmp_path: Path, method: str) -> None:
    options = {"mode": "mm", "start": 0.3} if method == "superfed" else {}
    found = []
    for mode in ("looped", "vectorized"):
        rayfl.run(experiment(tmp_path, mode, algorithm={"name": method, **options}, engine={"mode": mode}))
        table = pq.read_table(tmp_path / mode / "clients.parquet")
        found.append(np.array(table["loss"].to_pylist(), np.float64))
    np.testing.assert_allclose(*found, atol=1e-5)


def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "whole"))
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(experiment(tmp_path, "parts"), callbacks=[Interrupt(after=1)])
    rayfl.run(experiment(tmp_path, "parts"))
    one, other = outcome(tmp_path / "whole"), outcome(tmp_path / "parts")
    assert_equal(one.server["model"], other.server["model"])
    assert one.clients.equals(other.clients)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": {"name": "anomaly_detection", "normal": [0, 12]}}, r"task.normal names class 12, .* classes 0 to 9"),
        ({"task": {"name": "anomaly_detection", "normal": list(range(10))}}, "names all 10 classes .* name fewer"),
        ({"task": {"name": "anomaly_detection", "normal": [1, 1]}}, "normal"),
        ({"task": {"name": "anomaly_detection", "normal": []}}, "at least 1 item"),
        ({"dataset": "diabetes", "holdout": {}}, "set task=regression"),
        (
            {
                "dataset": {"name": "synthetic_text", "num_clients": 4},
                "partition": "natural",
                "holdout": {},
                "model": "window_lm",
            },
            "set task=language_model",
        ),
        ({"algorithm": {"name": "fedproto"}}, "anomaly_detection"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parts_of(**changes)


class Pooled(ClassificationModel):
    """A model whose head is applied to each row of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 10)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(features)
        return found


def test_a_model_without_a_vector_of_features_is_refused() -> None:
    words = r"model rows: task=anomaly_detection replaces the last layer, .* reads features of shape \(8, 8\)"
    with pytest.raises(ModelError, match=words):
        decoding(Network(Pooled), (), InputSpec("image", (1, 8, 8), 10), "rows")


def nine_alone(streams: Any) -> tuple[Any, ...]:
    """Four clients, of which the first has class 9 alone."""
    generator = np.random.default_rng(0)
    y = np.concatenate([np.full(20, 9), generator.integers(0, 10, 60)])
    return generator.random((80, 4), np.float32), y, 10, np.repeat(list("abcd"), 20)


OWN: dict[str, Any] = {"dataset": f"{__name__}:nine_alone", "partition": "natural", "holdout": {"test": 0.3}}


def test_clients_without_normal_samples_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rayfl"):
        parts_of(**OWN)
    assert any("1 of 4 clients have no normal sample among their training samples" in line for line in caplog.messages)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "rayfl"):
        parts_of(**OWN, task={"name": "anomaly_detection", "normal": NORMAL, "trains": "all"})
    assert not any("normal sample" in line for line in caplog.messages)


def test_data_without_normal_samples_are_refused() -> None:
    with pytest.raises(DataError, match=r"no training sample of any client is a normal one, .* task\.trains=all"):
        parts_of(**OWN | {"dataset": f"{__name__}:of_two"}, task={"name": "anomaly_detection", "normal": [1]})


def of_two(streams: Any) -> tuple[Any, ...]:
    """Four clients, without class 1."""
    x, y, classes, clients = nine_alone(streams)
    return x, np.where(y == 1, 2, y), classes, clients
