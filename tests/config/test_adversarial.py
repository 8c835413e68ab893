"""The section evaluation.adversarial: units by what the samples are, and what cannot be attacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from algorithms.registry import Experiment
from cluster.rounds.forking import fork
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.results.schemas import metrics_of
from rayfl.runs.rows import where
from tests.support.experiments import small_experiment


def parts(folder: Path, **changes: Any) -> Parts:
    content = small_experiment(folder, "run", "fedavg", backend="inline")
    changes.setdefault("partition", {"name": "iid", "num_clients": 3})
    return Parts(load_config(Experiment, {**content, **changes}, {}))


def noise(seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """A data set of a user: arrays in the shape of images."""
    return np.random.default_rng(seed).normal(0, 3, (40, 1, 4, 4)).astype(np.float32), np.arange(40) % 2, 2


def attack_on(folder: Path, dataset: dict[str, Any], section: dict[str, Any], **changes: Any) -> Any:
    model = {"name": "two_nn", "hidden": [4]}
    found = parts(folder, dataset=dataset, model=model, evaluation={"adversarial": section}, **changes)
    return found.input_attack


def test_pixels_are_measured_from_black_to_white_however_they_are_normalized(tmp_path: Path) -> None:
    plain = attack_on(tmp_path, {"name": "digits"}, {})
    assert plain.unit.shape == (1, 1, 1) and plain.unit == 1 and (plain.low, plain.high) == (0, 1)
    scaled = attack_on(tmp_path, {"name": "digits"}, {}, transform={"normalize": {"mean": [0.5], "std": [0.25]}})
    assert scaled.unit == 4 and (scaled.low, scaled.high) == (-2, 2)
    asked = attack_on(tmp_path, {"name": "digits"}, {"unit": "input", "norm": "l2", "radius": 1, "step": 0.5})
    assert np.array_equal(asked.unit, np.ones((1, 8, 8))) and asked.low is None and asked.norm == "l2"


def test_vectors_are_measured_as_models_see_them_and_categories_stay(tmp_path: Path) -> None:
    found = attack_on(tmp_path, {"name": "breast_cancer"}, {})
    assert np.array_equal(found.unit, np.ones(30)) and found.low is None
    table = tmp_path / "people.csv"
    rows = [f"{n % 7},{'abc'[n % 3]},{n % 5},{n % 2}" for n in range(60)]
    table.write_text("\n".join(["x_age,x_kind,x_other,y", *rows]))
    tables = attack_on(tmp_path, {"name": "parquet", "path": str(table), "x": ["x_age", "x_kind", "x_other"]}, {})
    assert tables.unit.tolist() == [1, 0, 0, 0, 1]


def test_images_whose_values_are_no_pixels_are_measured_as_they_are(tmp_path: Path) -> None:
    of = {"name": "custom", "function": "tests.config.test_adversarial:noise"}
    assert attack_on(tmp_path, of, {}).low is None
    with pytest.raises(ConfigError, match=r"evaluation\.adversarial\.unit is pixels, and samples are no images with"):
        attack_on(tmp_path, of, {"unit": "pixels"})


def test_what_cannot_be_attacked_is_refused_before_anything_starts(tmp_path: Path) -> None:
    graphs = {"dataset": {"name": "synthetic_graphs"}, "model": {"name": "gin"}, "partition": "natural"}
    with pytest.raises(ConfigError, match=r"evaluation\.adversarial: the data set has .*, and an edge, which is there"):
        _ = parts(tmp_path, **graphs, evaluation={"adversarial": {}}).input_attack
    with pytest.raises(ConfigError, match=r"evaluation\.adversarial: robust accuracy is measured in task=classif"):
        _ = parts(tmp_path, dataset={"name": "diabetes"}, task="regression", evaluation={"adversarial": {}}).task
    with pytest.raises(ConfigError, match=r"step is longer than radius"):
        parts(tmp_path, evaluation={"adversarial": {"radius": 0.001}})


def test_tables_have_it_and_a_fork_keeps_the_columns(tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "run", "fedavg", backend="inline")
    section = {"radius": 0.3, "step": 0.1, "steps": 3}
    content["evaluation"] = {**content.get("evaluation", {}), "splits": ["train", "test"], "adversarial": section}
    run = rayfl.run(content)
    assert metrics_of(run.rounds)[-1].name == "robust_top1"
    for split, known in (("train", False), ("test", True)):
        rows = where(run.clients, split=split, cohort="all").to_pylist()
        assert rows and all((row["robust_top1"] is not None) is known for row in rows)
    assert all(row["robust_top1"] <= row["top1"] for row in where(run.clients, split="test").to_pylist())
    with pytest.raises(ConfigError, match=r"^evaluation\.adversarial: a fork goes on with"):
        fork(run.path, "other", None, {"train.rounds": 5, "evaluation.adversarial": None})
