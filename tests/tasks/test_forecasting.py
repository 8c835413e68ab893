"""Runs of forecasting: methods, stops, options, own data, privacy, and what is refused before the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.partitions.stats import dataset_stats
from rayfl.data.series import Cut, Series, SeriesDataset
from rayfl.data.sources.base import Samples
from rayfl.errors import ConfigError, DataError, ModelError
from rayfl.examples import InputSpec
from rayfl.experiment.parts import Parts
from rayfl.plots.partition import label_matrix
from rayfl.randomness import RandomStreams
from rayfl.results.schemas import metrics_of
from rayfl.runs.rows import where
from tests.support.experiments import Interrupt, assert_same, outcome

torch.set_num_threads(1)
DATA: dict[str, Any] = {
    "name": "synthetic_series",
    "num_clients": 6,
    "times": 120,
    "period": 8,
    "window": 16,
    "horizon": 4,
    "season": 8,
}
NET = {"name": "two_nn", "hidden": [6]}


def sections(**changes: Any) -> dict[str, Any]:
    return {
        "dataset": DATA,
        "task": "forecasting",
        "model": {"name": "dlinear", "kernel": 5},
        "algorithm": "fedavg",
        "train": {"rounds": 3, "clients_per_round": 2, "local_epochs": 2, "batch_size": 8, "lr": 0.05},
        "evaluation": {"every": 3},
        "cluster": {"backend": "inline", "device": "cpu"},
        **changes,
    }


def checked(content: dict[str, Any]) -> Parts:
    parts = Parts(load_config(Experiment, content, {}))
    parts.check()
    return parts


HEADINGS = ["MSE scaled", "skill", "MAE scaled", "RMSE scaled", "MASE", "loss scaled"]
RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "ditto": {"algorithm": "ditto"},
    "fedrep": {"algorithm": {"name": "fedrep", "head_epochs": 1}, "model": {"name": "lstm_forecaster", "hidden": 5}},
    "fedper": {
        "algorithm": "fedper",
        "model": {"name": "patch_transformer", "patch": 4, "stride": 2, "width": 4, "heads": 2, "layers": 1},
    },
    "superfed": {"algorithm": {"name": "superfed", "mode": "mm", "start": 0.3}, "model": "nlinear"},
}


@pytest.mark.parametrize("method", RUNS)
@pytest.mark.first_case
def test_runs_are_the_same_looped_and_stacked(method: str, tmp_path: Path) -> None:
    content = sections(**RUNS[method])
    runs = {
        mode: rayfl.run(content, **{"engine.mode": mode, "storage_path": str(tmp_path), "name": mode})
        for mode in ("looped", "vectorized")
    }
    metrics = metrics_of(runs["looped"].rounds)
    assert [one.heading for one in metrics] == HEADINGS
    kept = {mode: where(run.clients, round=3, cohort="all", split="test") for mode, run in runs.items()}
    for metric in metrics:
        values, others = (np.array(kept[mode][metric.name], dtype=float) for mode in runs)
        np.testing.assert_allclose(values, others, rtol=1e-4, atol=1e-5)
        assert np.isfinite(values).all()


def test_a_stop_changes_no_bit(tmp_path: Path) -> None:
    content = sections(algorithm="ditto", tracking={"tensorboard": False})
    rayfl.run(content, storage_path=str(tmp_path), name="whole")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(content, callbacks=[Interrupt(1)], storage_path=str(tmp_path), name="stopped")
    rayfl.run(content, storage_path=str(tmp_path), name="stopped")
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "stopped"))


def pooled(content: dict[str, Any], folder: Path, name: str) -> dict[str, Any]:
    result = rayfl.run(content, storage_path=str(folder), name=name)
    row: dict[str, Any] = where(result.rounds, round=3, cohort="all", split="test").to_pylist()[0]
    return {key: row[f"pooled_{key}"] for key in ("mse", "skill", "mae", "loss")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"task": {"name": "forecasting", "loss": "absolute"}},
        {"task": {"name": "forecasting", "loss": "huber", "delta": 0.3}},
        {"dataset": {**DATA, "stride": 3}},
        {"dataset": {**DATA, "scaling": "global"}},
        {"dataset": {**DATA, "validation": 0.3}},
        {"dataset": {**DATA, "memory": 0.1}},
        {"dataset": {**DATA, "noise": 0.1}},
        {"dataset": {**DATA, "difference": 0.1}},
        {"model": {"name": "dlinear", "kernel": 3}},
    ],
)
def test_options_have_an_effect(changes: dict[str, Any], tmp_path: Path) -> None:
    results = [pooled(sections(**given), tmp_path, str(number)) for number, given in enumerate(({}, changes))]
    assert results[0]["mse"] != results[1]["mse"]


def test_the_season_changes_what_a_forecast_is_compared_with_alone(tmp_path: Path) -> None:
    one, other = (pooled(sections(dataset={**DATA, "season": s}), tmp_path, str(s)) for s in (1, 8))
    assert one.pop("skill") != other.pop("skill") and one == other


def own_series(streams: RandomStreams) -> SeriesDataset:
    """A user's own clients, in the units of their data."""
    values = streams.generator("mine").normal(size=(3, 60, 2)).cumsum(1)
    return SeriesDataset([Series(f"s{k}", own) for k, own in enumerate(values)], 1, Cut(6, 2), "none")


def own_samples(streams: RandomStreams) -> Samples:
    y = np.zeros((20, 3, 3), dtype=np.float32)
    spec = InputSpec("image", (1, 1, 5), 3, target="forecast", horizon=3)
    return Samples(np.zeros((20, 1, 1, 5), dtype=np.float32), y, spec, np.repeat(["a", "b"], 10))


def test_a_function_may_return_series_of_its_own_but_no_windows(tmp_path: Path) -> None:
    content = sections(dataset=f"{__name__}:own_series", model={"name": "lstm_forecaster", "hidden": 4})
    result = rayfl.run(content, storage_path=str(tmp_path), name="run")
    assert metrics_of(result.rounds)[0].heading == "MSE"
    with pytest.raises(ConfigError, match=r"held out by chance, .* return a rayfl.data.series.SeriesDataset"):
        checked(sections(dataset=f"{__name__}:own_samples"))


def test_data_sets_are_described() -> None:
    parts = checked(sections())
    about = dict(dataset_stats(parts.dataset).rows())
    assert about["clients"] == "6" and about["test samples"] == str(6 * 21)
    assert label_matrix(parts.dataset).tolist() == parts.dataset.sizes().sum(1, keepdims=True).tolist()
    assert parts.dataset.spec.words() == "windows of 16 times of 1 series with 4 times of 1 series to forecast each"


@pytest.mark.slow
def test_clients_and_single_windows_can_be_private(tmp_path: Path) -> None:
    uniform = {"name": "fedavg", "aggregation": "uniform"}
    train = {**sections()["train"], "sampling": "poisson", "clients_per_round": 4}
    whole = sections(algorithm=uniform, train=train, privacy={"clip_norm": 0.5, "noise_multiplier": 0.3})
    assert np.isfinite(pooled(whole, tmp_path, "clients")["mse"])
    single = {"example_clip_norm": 1.0, "example_noise_multiplier": 0.5}
    for model in ("dlinear", {"name": "lstm_forecaster", "hidden": 3}):
        content = sections(privacy=single, model=model)
        found = pooled(content, tmp_path, model if isinstance(model, str) else str(model["name"]))
        assert np.isfinite(found["mse"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dataset": "diabetes", "partition": {"name": "iid", "num_clients": 3}, "model": NET},
            r"forecasting learns from what comes after windows of series, .* set task=regression",
        ),
        ({"task": "regression"}, r"'synthetic_series' has what comes after windows of series: set task=forecasting"),
        ({"algorithm": "fedproto"}, r"fedproto cannot learn task=forecasting"),
        ({"holdout": {"test": 0.3}}, r"holdout: dataset 'synthetic_series', which has clients and splits of its own"),
        ({"partition": {"name": "iid", "num_clients": 3}}, r"partition.name: 'iid' cannot divide dataset 'synthetic_s"),
        ({"noise": {"kind": "pair", "ratio": 0.2}}, r"noise: dataset 'synthetic_series', which has"),
        ({"transform": {"normalize": "dataset"}}, r"transform: dataset 'synthetic_series', which has"),
        ({"augment": {"flip": True}}, r"augment: shifted or mirrored windows of series"),
        ({"attack": {"clients": [1], "labels": "random"}}, r"attack.labels: .*class"),
        ({"attack": {"clients": [1], "backdoor": {"target": 0}}}, r"attack.backdoor"),
        ({"model": "two_cnn"}, r"two_cnn|too small"),
        ({"model": {"name": "unet"}}, r"unet needs images"),
        ({"model": "char_lstm"}, r"char_lstm needs sequences of tokens"),
        ({"model": {"name": "matrix_factorization"}}, r"matrix_factorization needs items"),
        ({"algorithm": "fedrep"}, r"head_group is last_layer, which is all that this model trains"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(changes: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, DataError, ModelError), match=words):
        checked(sections(**changes))


def two_series(streams: RandomStreams) -> SeriesDataset:
    values = streams.generator("mine").normal(size=(3, 60, 2)).cumsum(1)
    return SeriesDataset([Series(f"s{k}", own) for k, own in enumerate(values)], 2, Cut(6, 2), "client")


def test_several_series_of_a_client_have_a_vector_of_features_each(tmp_path: Path) -> None:
    data = {"dataset": f"{__name__}:two_series"}
    for number, model in enumerate(("dlinear", {"name": "nlinear", "individual": True})):
        found = pooled(sections(**data, model=model), tmp_path, str(number))
        assert np.isfinite(found["skill"])
        with pytest.raises(
            ConfigError, match=r"moon cannot learn task=forecasting, .* one vector of features a sample"
        ):
            checked(sections(**data, model=model, algorithm="moon"))
    checked(sections(**data, model={"name": "lstm_forecaster", "hidden": 4}, algorithm="moon"))


@pytest.mark.parametrize("name", ["parquet", "arrays"])
def test_files_of_rows_say_which_source_cuts_windows(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"windows of series are cut by dataset=series"):
        checked(sections(dataset={"name": name, "path": str(tmp_path / "a.parquet")}))
