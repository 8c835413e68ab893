"""Learning without labels in whole runs: options, what is refused before the start, both engines, methods, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import rayfl
from algorithms.base import Averaging
from algorithms.registry import Experiment
from rayfl import Client, Weighted
from rayfl.config.loading import load_config
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.errors import ConfigError
from rayfl.examples import Examples
from rayfl.experiment.parts import Parts
from rayfl.params import Tree
from rayfl.runs.committed import CommittedModels
from rayfl.runs.export import export_model
from rayfl.runs.folder import open_run
from rayfl.runs.rows import where
from rayfl.tasks.base import Predictor
from tests.metrics.test_representations import knn_by_loops

torch.set_num_threads(1)


def sections(**changes: Any) -> dict[str, Any]:
    return {
        "dataset": "digits",
        "partition": {"name": "iid", "num_clients": 20},
        "holdout": {"test": 0.3, "validation": 0.2},
        "task": {"name": "self_supervised", "hidden": 8, "projection": 4},
        "model": {"name": "two_nn", "hidden": [6]},
        "augment": {"crop": 1, "jitter": 1},
        "algorithm": "fedavg",
        "train": {"rounds": 2, "clients_per_round": 3, "local_epochs": 1, "lr": 0.05, "batch_size": 10},
        "cluster": {"backend": "inline"},
        **changes,
    }


def checked(content: dict[str, Any]) -> Parts:
    parts = Parts(load_config(Experiment, content, {}))
    parts.check()
    return parts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"augment": {}}, r"two views of each image, which are equal without the section augment: set for instance"),
        ({"dataset": "wine"}, r"compares two views of each image, but dataset 'wine' has vectors of 13 numbers"),
        ({"evaluation": {"official_test": True}}, r"evaluation.official_test: task=self_supervised compares samples"),
        ({"noise": {"kind": "pair", "ratio": 0.1}}, r"noise: task=self_supervised learns without labels"),
        ({"attack": {"clients": [1], "labels": "random"}}, r"attack.labels: task=self_supervised learns without"),
        ({"algorithm": "fedproto"}, r"cannot learn task=self_supervised, which has not one class a sample"),
        ({"algorithm": {"name": "apfl", "mix": "logits"}}, r"algorithm.mix=logits: .* set algorithm.mix=weights"),
        (
            {"task": {"name": "self_supervised", "objective": "byol"}},
            r"byol needs a target network .* algorithm=fedema",
        ),
        ({"selection": "oort"}, r"task=self_supervised compares samples with each other"),
    ],
)
def test_what_cannot_be_had_is_refused_before_the_start(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        checked(sections(**changes))


def test_options_reach_the_network_and_the_evaluation() -> None:
    own = {"hidden": 7, "projection": 3, "norm": "none", "neighbours": 2, "knn_temperature": 0.5}
    plain, narrow = (
        checked(sections(task={"name": "self_supervised", "objective": "simclr", "temperature": 0.2, **options}))
        for options in ({}, own)
    )
    shapes = {name: tuple(leaf.shape) for name, leaf in narrow.task.network.initialize(0).items()}
    assert shapes["projector.0.weight"] == (7, 6) and shapes["projector.2.weight"] == (3, 7)
    assert not narrow.task.network.buffer_names and plain.task.network.buffer_names
    assert plain.task.network.head_shape == (128, 512)
    samples = Examples(torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 5)
    model = narrow.task.network.initialize(0)
    known = narrow.task.predictions([model], samples.x).detach()
    expected = knn_by_loops(known, known, samples.y.tolist(), 2, 0.5, own=True)
    found = evaluate({"own": Predictor.of(model)}, samples, narrow.task, 9, training=samples, own=True)["own"]
    hits = [a == b for a, b in zip(expected, samples.y.tolist(), strict=True)]
    assert found.metrics()["knn_top1"] == pytest.approx(np.mean(hits))
    assert narrow.task.objective.temperature == 0.2
    with pytest.raises(ConfigError, match="temperature is for objective=simclr"):
        checked(sections(task={"name": "self_supervised", "temperature": 0.2}))


def test_labels_of_data_for_classification_still_mean_classification() -> None:
    with pytest.raises(ConfigError, match="set task=classification"):
        checked(sections(task="regression"))


@pytest.mark.parametrize(
    ("objective", "splits"),
    [("simsiam", ["test"]), pytest.param("simclr", ["train", "validation", "test"], marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_looped_and_stacked_learn_the_same(objective: str, splits: list[str], tmp_path: Path) -> None:
    task = {"name": "self_supervised", "objective": objective, "hidden": 32, "projection": 8}
    task["metrics"] = ["linear_top1"]
    model = {"name": "two_nn", "hidden": [32]}  # few units may all be idle, and their normalization enlarges round-off
    content = sections(task=task, model=model, evaluation={"every": 2, "splits": splits})
    runs = {
        mode: rayfl.run(content, **{"engine.mode": mode, "storage_path": str(tmp_path), "name": mode})
        for mode in ("looped", "vectorized")
    }
    rows = {mode: where(run.clients, round=2, cohort="all") for mode, run in runs.items()}
    for column in ("loss", "feature_std"):
        values, others = (np.array(rows[mode][column], dtype=float) for mode in runs)
        np.testing.assert_allclose(values, others, rtol=1e-3, atol=1e-4)
    for column in ("knn_top1", "linear_top1"):
        values, others = (np.array(rows[mode][column], dtype=float) for mode in runs)
        assert np.isfinite(values).all() and np.abs(values - others).mean() < 0.02


class Asking(Averaging):
    """Averages, and sends what it finds of its samples beside its model."""

    name: str = "asking"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        slope = await client.gradient(model, self.objective)
        again = await client.gradient(model, self.objective, examples=client.examples())
        assert all(torch.equal(slope[name], again[name]) for name in slope)
        assert any(leaf.abs().sum() > 0 for leaf in slope.values())
        found = await client.score(Predictor.of(model), "validation")
        assert 0 <= found.metrics()["knn_top1"] <= 1 and found.n == len(client.examples("validation"))
        return await super().local_update(client, model)


def test_methods_take_gradients_of_views_and_score_their_models(tmp_path: Path) -> None:
    found = rayfl.run(sections(algorithm=f"{__name__}:Asking"), storage_path=str(tmp_path), name="asking")
    assert np.isfinite(found.score("loss"))


def test_an_exported_model_has_its_projector_and_says_so(tmp_path: Path) -> None:
    result = rayfl.run(sections(), storage_path=str(tmp_path), name="run")
    models = CommittedModels(open_run(str(result.path), Experiment))
    found = export_model(models, 0, None, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        about = json.loads(file.metadata()["rayfl"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert about["task"]["hidden"] == 8 and "(projector)" in found.modules and "(head): Identity" in found.modules
    module = models.parts.task.network.factory()
    assert not module.load_state_dict(tensors, strict=False).unexpected_keys
