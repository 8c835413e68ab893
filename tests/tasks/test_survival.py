"""Survival from targets to scores: files and functions, what is refused, chunks of a test part, looped and stacked."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.partitions.stats import dataset_stats
from rayfl.data.sources.official import OFFICIAL_PIECE
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.engine.scoring.evaluation_together import ScoringRequest, evaluate_together
from rayfl.errors import ConfigError, DataError
from rayfl.examples import Examples, InputSpec
from rayfl.experiment.parts import Parts
from rayfl.models.zoo import TabularMLP
from rayfl.plots.partition import label_matrix
from rayfl.randomness import RandomStreams
from rayfl.results.schemas import metrics_of
from rayfl.runs.rows import where
from rayfl.tasks.base import Predictor
from rayfl.tasks.survival import Survival
from tests.metrics.test_survival import by_loops, drawn
from tests.support.elsewhere import elsewhere

torch.set_num_threads(1)
SPEC = InputSpec("image", (3,), 1, target="survival")
CLIENTS, EACH = 4, 30


def made(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Patients whose first number decides on their risk; inputs, targets and clients."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(CLIENTS * EACH, 3)).astype(np.float32)
    death, end = generator.exponential(np.exp(5 - 2 * x[:, 0])), generator.uniform(0, 400, len(x))
    y = np.stack([np.minimum(death, end), death < end], 1)
    return x, y, np.repeat([f"region-{number}" for number in range(CLIENTS)], EACH)


def patients(streams: RandomStreams) -> tuple[Any, ...]:
    x, y, clients = made()
    return x, y, None, clients


def wrong(streams: RandomStreams) -> tuple[Any, ...]:
    x, y, clients = made()
    y[40, 0] = -3
    return x, y, None, clients


def wrong_event(streams: RandomStreams) -> tuple[Any, ...]:
    x, y, clients = made()
    y[40, 1] = 2
    return x, y, None, clients


def three_columns(streams: RandomStreams) -> tuple[Any, ...]:
    x, y, clients = made()
    return x, np.concatenate([y, y[:, :1]], 1), None, clients


def two_outputs(streams: RandomStreams) -> tuple[Any, ...]:
    x, y, clients = made()
    return x, y, 2, clients


def one_without(streams: RandomStreams) -> tuple[Any, ...]:
    x, y, clients = made()
    y[:EACH, 1] = 0
    return x, y, None, clients


def nobody(streams: RandomStreams) -> tuple[Any, ...]:
    x, y, clients = made()
    y[:, 1] = 0
    return x, y, None, clients


def sections(dataset: Any = f"{__name__}:patients", **changes: Any) -> dict[str, Any]:
    return {
        "dataset": dataset,
        "partition": "natural",
        "task": "survival",
        "model": {"name": "tabular_mlp", "hidden": []},
        "algorithm": "fedavg",
        "train": {"rounds": 4, "clients_per_round": "all", "local_epochs": 2, "lr": 0.1, "batch_size": 8},
        "cluster": {"backend": "inline"},
        **changes,
    }


def checked(content: dict[str, Any]) -> Parts:
    parts = Parts(load_config(Experiment, content, {}))
    parts.check()
    return parts


def table(path: Path, **columns: Any) -> Path:
    x, y, clients = made()
    found = {"a": x[:, 0], "b": x[:, 1], "days": y[:, 0], "died": y[:, 1].astype(int), "client": clients, **columns}
    pq.write_table(pa.table(found), path)
    return path


def test_a_test_part_is_scored_as_a_whole_in_whatever_batches() -> None:
    task = Survival(TabularMLP(hidden=(4,)).network(SPEC), spec=SPEC)
    asked, expected = [], []
    for client, size in enumerate((23, 5, 0, 14)):
        _, y = drawn(client, size)
        x = torch.randn(size, 3, generator=torch.Generator().manual_seed(client))
        models = {"global": task.network.initialize(0), "own": task.network.initialize(1 + client)}
        asked.append(ScoringRequest({name: Predictor.of(one) for name, one in models.items()}, Examples(x, y)))
        risks = {name: task.network.logits(one, x, training=False)[:, 0] for name, one in models.items()}
        expected.append({name: by_loops(risk, y) for name, risk in risks.items()})
    for batch_size in (4, 1000):
        together = evaluate_together(asked, task, batch_size)
        for request, stacked, wanted in zip(asked, together, expected, strict=True):
            alone = evaluate(request.predictors, request.examples, task, batch_size)
            for found in (alone, stacked) if len(request.examples) else (alone,):
                for name, (losses, right, pairs) in wanted.items():
                    vector = found[name].vector
                    assert vector[[0, 2, 3]].tolist() == [len(losses), right, pairs]
                    assert vector[1] == pytest.approx(sum(losses), rel=1e-5, abs=1e-6)


def test_on_a_device_the_sums_are_those_of_the_processor() -> None:
    task = Survival(TabularMLP(hidden=(4,)).network(SPEC), spec=SPEC)
    model, (_, y) = task.network.initialize(0), drawn(1, 40)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    expected = evaluate({"own": Predictor.of(model)}, Examples(x, y), task, 1000)["own"].vector
    with elsewhere() as device:
        there = {name: leaf.to(device) for name, leaf in model.items()}
        examples = Examples(x.to(device), y.to(device))
        found = evaluate({"own": Predictor.of(there)}, examples, task, 7)["own"].vector
    assert found[[0, 2, 3]].tolist() == expected[[0, 2, 3]].tolist()
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


@pytest.mark.parametrize("method", [pytest.param("fedavg", marks=pytest.mark.slow), "ditto"])
def test_risks_are_learned_looped_and_stacked(method: str, tmp_path: Path) -> None:
    content = sections(algorithm=method)
    runs = {
        mode: rayfl.run(content, **{"engine.mode": mode, "storage_path": str(tmp_path), "name": mode})
        for mode in ("looped", "vectorized")
    }
    assert [metric.name for metric in metrics_of(runs["looped"].rounds)] == ["c_index", "loss"]
    rows = {mode: where(run.clients, round=4, cohort="all", split="test") for mode, run in runs.items()}
    for column in ("c_index", "loss"):
        values, others = (np.array(rows[mode][column], dtype=float) for mode in runs)
        np.testing.assert_allclose(values, others, rtol=1e-3, atol=1e-3)
    summary = where(runs["looped"].rounds, round=4, cohort="all", split="test").to_pylist()
    assert all(row["c_index"] > 0.75 and row["pooled_c_index"] > 0.75 for row in summary)


@pytest.mark.parametrize(("named", "y"), [(("days", "died"), ["days", "died"]), (("time", "event"), "auto")])
def test_parquet_tables_name_the_columns_or_call_them_time_and_event(
    named: tuple[str, str], y: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    file = pq.read_table(table(tmp_path / "found.parquet"))
    renamed = [dict(zip(("days", "died"), named, strict=True)).get(name, name) for name in file.column_names]
    pq.write_table(file.rename_columns(renamed), tmp_path / "mine.parquet")
    parts = checked(sections({"name": "parquet", "path": str(tmp_path / "mine.parquet"), "x": ["a", "b"], "y": y}))
    assert parts.dataset.spec == InputSpec("image", (2,), 1, target="survival")
    _, expected, _ = made()
    found = np.concatenate([np.concatenate(list(parts.dataset.labels(k).values())) for k in range(CLIENTS)])
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.astype(np.float32).tolist()))
    about = dict(dataset_stats(parts.dataset).rows())
    assert about["time"].startswith("min ") and about["event"].endswith("max 1")
    assert label_matrix(parts.dataset).sum(1).tolist() == [EACH] * CLIENTS


def test_one_column_of_lists_is_time_and_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    both = made()[1].tolist()
    path = table(tmp_path / "mine.parquet", y=both)
    parts = checked(sections({"name": "parquet", "path": str(path), "x": ["a", "b"]}))
    assert parts.dataset.labels(0)["train"].shape[1] == 2
    path = table(tmp_path / "long.parquet", y=[[*one, 1.0] for one in both])
    with pytest.raises(DataError, match=r"column 'y' has lists of 3 numbers; survival is learned of two"):
        checked(sections({"name": "parquet", "path": str(path), "x": ["a", "b"]}))


@pytest.mark.parametrize(
    ("columns", "y", "words"),
    [
        ({}, "days", r"dataset.y names days of .*survival is learned of two columns"),
        ({}, ["days", "died", "a"], r"names days, died, a of .*: name the time and the event"),
        ({}, "auto", r"has no columns time and event, only .*days, died.* with dataset.y=\[TIME, EVENT\]"),
        ({}, ["died", "days"], r"column 'days', row 0 \(client 'region-0'\) is .* it must be 1 \(the event was seen"),
        ({"days": [-1.0] * 120}, ["days", "died"], r"column 'days', row 0 \(client .* a finite time of at least 0"),
        ({"days": [float("inf")] * 120}, ["days", "died"], r"column 'days', row 0 .* a finite time of at least 0"),
        ({"died": [2] * 120}, ["days", "died"], r"column 'died', row 0 .* is 2.0; it must be 1 .*or 0"),
    ],
)
def test_what_is_wrong_in_a_table_is_named(
    columns: dict[str, Any], y: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    path = table(tmp_path / "mine.parquet", **columns)
    with pytest.raises(DataError, match=words):
        checked(sections({"name": "parquet", "path": str(path), "x": ["a", "b"], "y": y}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong", r"target 0 of sample 40 \(client 'region-1'\) is -3.0, but must be a finite time of at least 0"),
        ("wrong_event", r"target 1 of sample 40 \(client 'region-1'\) is 2.0, but must be 1 \(the event was seen"),
        ("three_columns", r"has .* the shape \(120, 3\); needed are numbers of shape \(120, 2\): a time"),
        ("two_outputs", r"the third of what it returns is 2, but task=survival has one output, the risk"),
        ("nobody", r"no training sample of any client has an event, so that there is nothing to learn"),
    ],
)
def test_what_is_wrong_in_what_a_function_returns_is_named(name: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        checked(sections(f"{__name__}:{name}"))


def test_clients_without_an_event_are_named_and_learn_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "rayfl"):
        content = sections(f"{__name__}:one_without", algorithm="local")
        result = rayfl.run(content, storage_path=str(tmp_path), name="run")
    assert (
        "1 of 4 clients have no event among their training samples and learn nothing by themselves: 0 (region-0)"
        in (caplog.text)
    )
    rows = where(result.clients, cohort="all", split="test", name="region-0").to_pylist()
    assert {row["c_index"] for row in rows} == {None} and {row["loss"] for row in rows} == {0.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dataset": "wine", "partition": {"name": "iid", "num_clients": 3}},
            r"survival learns from the time of an event, .* set task=classif",
        ),
        ({"algorithm": "fedproto"}, r"fedproto cannot learn task=survival, which has not one class a sample"),
        ({"algorithm": "feddf", "holdout": {"public": 8}}, r"feddf cannot learn task=survival, .*probabilit"),
        ({"noise": {"kind": "pair", "ratio": 0.2}}, r"noise: wrong labels are those of another class"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        checked(sections(**changes))


def test_an_official_test_part_in_pieces_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    generator, count = np.random.default_rng(0), OFFICIAL_PIECE + 40
    columns = {
        "x": list(generator.normal(size=(count, 2)).astype(np.float32)),
        "time": generator.uniform(1, 9, count),
        "event": np.ones(count),
        "client": np.arange(count) % 2,
    }

    def written(training: int) -> dict[str, Any]:
        path = tmp_path / f"{training}.parquet"
        pq.write_table(pa.table({**columns, "split": np.where(np.arange(count) < training, "train", "test")}), path)
        return sections({"name": "parquet", "path": str(path)}, evaluation={"official_test": True})

    checked(written(40))
    with pytest.raises(
        ConfigError, match=r"official_test: its 2049 samples are scored in pieces of 2048, but task=surv"
    ):
        checked(written(39))
