"""Bins of confidence are kept with the summaries they belong to."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import rayfl
from rayfl.metrics import Statistics, batch_statistics
from rayfl.results.calibration import CALIBRATION_SCHEMA, bin_rows
from rayfl.results.tables import ResultTables
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.support.experiments import small_experiment

KEY = ("round", "split", "cohort", "phase", "model", "selected_on", "choice")


def confident(*pairs: tuple[float, bool]) -> Statistics:
    """Samples of two classes with these confidences, predicted rightly or not."""
    logits = torch.tensor([[c, 1 - c] for c, _ in pairs], dtype=torch.float64).log()
    return Statistics.from_vector(batch_statistics(logits, torch.tensor([0 if right else 1 for _, right in pairs])))


def test_bins_by_hand() -> None:
    summary = dict.fromkeys(KEY, "x")
    rows = bin_rows(summary, confident((0.61, True), (0.63, False), (0.98, True)))
    assert [(row["bin"], row["n"], row["accuracy"]) for row in rows] == [(10, 2, 0.5), (15, 1, 1.0)]
    assert [row["confidence"] for row in rows] == pytest.approx([0.62, 0.98])
    assert all(row["model"] == "x" for row in rows)
    assert bin_rows(summary, Statistics.empty()) == []


def test_every_summary_over_all_clients_has_its_bins() -> None:
    tables = ResultTables(["a", "b"], "lambda")
    grid = {
        split: {
            "lambda=0.0": confident((0.7, True), (0.8, False)),
            "lambda=1.0": confident((0.9, True), (0.9, True)),
        }
        for split in ("validation", "test")
    }
    rows = tables.add(1, "all", "received", {0: grid, 1: grid}, (0, 0))
    tables.add(1, "selected", "trained", {0: grid}, (0, 0))
    assert tables.calibration.schema == CALIBRATION_SCHEMA
    assert not any("pooled" in row for row in rows)
    bins = tables.calibration.to_pylist()
    assert {row["cohort"] for row in bins} == {"all"}
    for row in rows:
        own = [entry for entry in bins if all(entry[name] == row[name] for name in KEY)]
        gaps = [(entry["n"], abs(entry["accuracy"] - entry["confidence"])) for entry in own]
        assert sum(n for n, _ in gaps) == row["n"]
        assert sum(n * gap for n, gap in gaps) / row["n"] == pytest.approx(row["pooled_ece"])
        assert max(gap for _, gap in gaps) == pytest.approx(row["pooled_mce"])


def test_a_run_of_before_there_were_bins_goes_on(tmp_path: Path) -> None:
    experiment = small_experiment(tmp_path, "old", "fedavg", backend="inline")
    rayfl.run({**experiment, "name": "whole"})
    whole = pq.read_table(tmp_path / "whole" / "calibration.parquet")
    assert set(whole["round"].to_pylist()) == {2, 4}
    shorter = {**experiment["train"], "rounds": 4}
    rayfl.run({**experiment, "train": shorter})
    store = CommitStore(Storage(str(tmp_path / "old")))
    manifest = store.read_manifest(store.manifests()[-2])
    tables = {name: file for name, file in manifest.tables.items() if name != "calibration"}
    store.drop_after(manifest.rounds_completed)
    store.write_manifest(manifest.model_copy(update={"tables": tables}))
    result = rayfl.run(experiment)
    assert result.rounds_completed == 4
    again = pq.read_table(tmp_path / "old" / "calibration.parquet")
    assert set(again["round"].to_pylist()) == {4}
    assert again.to_pylist() == [row for row in whole.to_pylist() if row["round"] == 4]
