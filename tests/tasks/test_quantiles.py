"""Runs of forecasting by quantiles: models, methods, own networks, exports, and what is refused before the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import nn

import rayfl
from algorithms.registry import METHODS, Experiment
from rayfl.cli.anatomy import anatomies
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError, ModelError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts
from rayfl.models.networks.forecasters import NLinear
from rayfl.report.columns import columns_of
from rayfl.report.comparison import compare
from rayfl.report.lines import Wanted
from rayfl.results.schemas import metrics_of
from rayfl.runs.committed import CommittedModels
from rayfl.runs.export import export_model
from rayfl.runs.finding import load_runs
from rayfl.runs.folder import open_run
from rayfl.runs.rows import where
from rayfl.sweeps.measures import Measure
from rayfl.tasks.forecasting import ForecastingSection

torch.set_num_threads(1)
LEVELS = [0.1, 0.5, 0.9]
BY_QUANTILES = {"name": "forecasting", "loss": "quantile", "quantiles": LEVELS}
HEADINGS = {
    "pinball": "pinball loss scaled",
    "coverage": "coverage of the 80 % interval",
    "width": "interval width scaled",
    "mse": "MSE scaled",
    "skill": "skill",
    "mae": "MAE scaled",
    "rmse": "RMSE scaled",
    "mase": "MASE",
    "loss": "loss scaled",
}


class OwnNetwork(nn.Module):
    """As a user writes it: outputs as many as the description says."""

    def __init__(self, spec: InputSpec) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(spec.shape[0] * spec.shape[-1], 8), nn.Tanh())
        self.head = nn.Linear(8, spec.num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.body(x))
        return made


def too_narrow(spec: InputSpec) -> nn.Module:
    return OwnNetwork(InputSpec("image", spec.shape, spec.num_classes // 3))


def sections(**changes: Any) -> dict[str, Any]:
    return {
        "dataset": {
            "name": "synthetic_series",
            "num_clients": 6,
            "times": 120,
            "window": 16,
            "horizon": 4,
        },
        "task": BY_QUANTILES,
        "model": {"name": "dlinear", "kernel": 5},
        "algorithm": "fedavg",
        "train": {"rounds": 3, "clients_per_round": 2, "local_epochs": 2, "batch_size": 8, "lr": 0.05},
        "evaluation": {"every": 3},
        "cluster": {"backend": "inline", "device": "cpu"},
        **changes,
    }


OWN = {"name": f"{__name__}:OwnNetwork", "head": "head"}
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "ditto": {"algorithm": "ditto", "model": "nlinear"},
    "fedrep": {"algorithm": {"name": "fedrep", "head_epochs": 1}, "model": {"name": "lstm_forecaster", "hidden": 5}},
    "fedper": {
        "algorithm": "fedper",
        "model": {"name": "patch_transformer", "patch": 4, "stride": 2, "width": 4, "heads": 2, "layers": 1},
    },
    "superfed": {"algorithm": {"name": "superfed", "mode": "mm", "start": 0.3}, "model": OWN},
    "apfl": {"algorithm": "apfl", "model": OWN},
}


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=() if one in ("ditto", "superfed") else pytest.mark.slow) for one in RUNS]
)
@pytest.mark.first_case
def test_runs_are_the_same_looped_and_stacked(method: str, tmp_path: Path) -> None:
    content = sections(**RUNS[method])
    runs = {
        mode: rayfl.run(content, **{"engine.mode": mode, "storage_path": str(tmp_path), "name": mode})
        for mode in ("looped", "vectorized")
    }
    assert {one.name: one.heading for one in metrics_of(runs["looped"].rounds)} == HEADINGS
    kept = {mode: where(run.clients, round=3, cohort="all", split="test") for mode, run in runs.items()}
    for name in HEADINGS:
        values, others = (np.array(kept[mode][name], dtype=float) for mode in runs)
        # A number at the border of its interval is in it or not by round-off.
        np.testing.assert_allclose(values, others, rtol=1e-4, atol=0.02 if name == "coverage" else 1e-5)
        assert np.isfinite(values).all()
    clients = kept["looped"]
    np.testing.assert_allclose(np.array(clients["rmse"]) ** 2, np.array(clients["mse"]), rtol=1e-9)
    assert (np.array(clients["width"]) > 0).all()


@pytest.mark.slow
def test_more_training_brings_the_coverage_near_its_level_and_lowers_the_loss(tmp_path: Path) -> None:
    content = sections(model="nlinear", evaluation={"every": 1, "splits": ["train", "test"]})
    content["train"] = {**content["train"], "rounds": 30, "clients_per_round": "all", "optimizer": "adam", "lr": 0.02}
    result = rayfl.run(content, storage_path=str(tmp_path), name="run")
    rows = [where(result.rounds, round=number, cohort="all", split="train").to_pylist()[0] for number in (1, 30)]
    assert rows[1]["pinball"] < rows[0]["pinball"]
    assert abs(rows[1]["pooled_coverage"] - 0.8) < 0.05 < abs(rows[0]["pooled_coverage"] - 0.8)
    assert rows[1]["pooled_rmse"] == pytest.approx(rows[1]["pooled_mse"] ** 0.5)


def test_no_coverage_is_the_best(tmp_path: Path) -> None:
    """Coverage is good near its level, and width for what it costs: reports mark neither, and nothing goes by it."""
    for method in ("fedavg", "ditto"):
        rayfl.run(sections(model="nlinear", algorithm=method), storage_path=str(tmp_path), name=method)
    runs = load_runs([str(tmp_path / method) for method in ("fedavg", "ditto")], METHODS)
    names = ["pinball", "coverage", "width", "mae"]
    comparison = compare(runs, Wanted([columns_of(runs)[name] for name in names]))
    marked = {name: any(line.cells[name].best for line in comparison.lines) for name in names}
    assert marked == {"pinball": True, "coverage": False, "width": False, "mae": True}
    with pytest.raises(ConfigError, match="no coverage of the 80 % interval is better than another: choose pinball"):
        Parts(load_config(Experiment, sections(early_stopping={"patience": 1, "metric": "coverage"}), {})).check()
    with pytest.raises(ConfigError, match="no interval width is better than another: choose pinball"):
        Measure.of_task(metrics_of(runs[0].rounds), "width", "personalized", "validation")


def test_an_exported_model_says_which_quantiles_its_outputs_are(tmp_path: Path) -> None:
    result = rayfl.run(sections(model="nlinear"), storage_path=str(tmp_path), name="run")
    models = CommittedModels(open_run(str(result.path), Experiment))
    export_model(models, 0, None, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        about = json.loads(file.metadata()["rayfl"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert about["inputs"]["quantiles"] == LEVELS and about["inputs"]["classes"] == 4 * 3
    assert about["inputs"]["horizon"] == 4
    module = NLinear().build(models.parts.model_spec)
    module.load_state_dict(tensors)
    examples = models.parts.dataset.load(0)["test"]
    outputs = module.eval()(examples.x).reshape(len(examples), 4, 3).sort(-1).values.detach().numpy()
    error = examples.y[:, 0].numpy() - outputs[:, :, 1]
    np.testing.assert_allclose(about["metrics"]["test"]["mse"], (error**2).mean(), rtol=1e-5)


def test_a_model_is_shown_with_all_its_outputs() -> None:
    shown = anatomies(load_config(Experiment, sections(model=OWN), {}))
    assert shown[0].classes == 12 and shown[0].head == 12 * 9


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"model": {"name": f"{__name__}:too_narrow", "head": "head"}},
            ModelError,
            r"needed are .* \(2, 12\)",
        ),
        ({"algorithm": "feddf"}, ConfigError, r"feddf cannot learn task=forecasting"),
        ({"algorithm": "fedrep"}, ConfigError, r"head_group is last_layer, which is all that this model trains"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Parts(load_config(Experiment, sections(**changes), {})).check()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "quantile"}, r"quantiles and loss=quantile need each other"),
        ({"quantiles": [0.5]}, r"quantiles and loss=quantile need each other"),
        ({"loss": "quantile", "quantiles": [0.0, 0.5]}, r"quantiles: 0 does not lie between 0 and 1"),
        ({"loss": "quantile", "quantiles": [0.5, 90]}, r"quantiles: 90 does not lie between 0 and 1"),
        ({"loss": "quantile", "quantiles": [0.5, float("nan")]}, r"quantiles: nan does not lie between 0 and 1"),
        (
            {"loss": "quantile", "quantiles": [0.5, 0.1]},
            r"quantiles: 0.1 comes after 0.5: give each once, in",
        ),
        ({"loss": "quantile", "quantiles": [0.1, 0.5, 0.5]}, r"quantiles: 0.5 comes after 0.5: give each once"),
        ({"loss": "quantile", "quantiles": [0.1, 0.9]}, r"quantiles lack 0.5, the median, of which mse and mae are"),
        ({"loss": "quantile", "quantiles": [0.5], "delta": 2.0}, r"delta is for loss=huber"),
    ],
)
def test_quantiles_that_are_none_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ForecastingSection(**options)
