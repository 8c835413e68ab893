"""Figures computed from tables, on made tables and on a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from algorithms.registry import METHODS, Experiment
from rayfl.plots.series import seeds_together
from rayfl.report.rows import RowKey, curve
from rayfl.runs.curves import accuracy_curve, download_effect, mean_over_seeds
from rayfl.runs.finding import load_run
from rayfl.runs.folder import open_run
from rayfl.runs.rows import model_rows
from rayfl.runs.summary import label_of
from rayfl.storage.files import Storage
from rayfl.tracking.timings import read_timings
from tests.support.experiments import small_experiment


def experiment(folder: Path, method: str) -> dict[str, Any]:
    config = small_experiment(folder, method, method, backend="inline")
    return config | {"evaluation": {"every": 1, "cohort_received": True}}


def test_downloads_cost_what_the_tables_say_and_nothing_where_the_inherited_model_is_kept(tmp_path: Path) -> None:
    average = rayfl.run(experiment(tmp_path, "fedavg"))
    effect = download_effect(average.clients)
    assert set(effect) == {1, 2, 3, 4}
    assert all(len(clients) == 3 for clients in effect.values())
    row = {(r["round"], r["client"], r["phase"], r["model"]): r["top1"]
           for r in average.clients.to_pylist() if r["split"] == "test" and r["cohort"] == "selected"}  # fmt: skip
    for round, clients in effect.items():
        for client, value in clients.items():
            assert value == row[round, client, "received", "global"] - row[round, client, "trained", "local"]
    assert np.mean([value for clients in effect.values() for value in clients.values()]) < -0.2
    inherited = rayfl.run(experiment(tmp_path, "fedphp"))
    kept = download_effect(inherited.clients, received="hpm", trained="hpm")
    assert {value for clients in kept.values() for value in clients.values()} == {0.0}


def test_rows_of_the_cohort_have_bytes_and_the_variance_of_updates(tmp_path: Path) -> None:
    result = rayfl.run(experiment(tmp_path, "fedavg"))
    selected = [row for row in result.clients.to_pylist() if row["cohort"] == "selected"]
    sizes = {(row["bytes_down"], row["bytes_up"]) for row in selected}
    assert len(sizes) == 1 and min(sizes.pop()) > 1000
    assert {row["bytes_down"] for row in result.clients.to_pylist() if row["cohort"] == "all"} == {None}
    trained = [row for row in result.rounds.to_pylist() if row["cohort"] == "selected"]
    assert all(row["update_variance"] > 0 for row in trained)
    assert all(1 / 5 <= row["top1_jain"] <= 1 for row in result.rounds.to_pylist())
    assert len(accuracy_curve(result.rounds, "global")) == 4


def test_timings_are_kept_by_round_and_phase(tmp_path: Path) -> None:
    result = rayfl.run(experiment(tmp_path, "fedavg"))
    lines = read_timings(Storage(result.path))
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert all({"clients", "server", "evaluation", "commit"} <= set(line) for line in lines)
    assert all(value >= 0 for line in lines for value in line.values())
    assert read_timings(Storage(str(tmp_path / "nothing"))) == []


def test_one_number_in_every_table_and_figure() -> None:
    """Two seeds with 0.2 and 0.4: the sample standard deviation is 0.2 / sqrt(2) wherever it is shown; one has none."""
    mean, spread = mean_over_seeds([0.2, 0.4])
    assert (mean, spread) == (pytest.approx(0.3), pytest.approx(0.2 / 2**0.5))
    assert seeds_together([{1: 0.2, 2: 0.5}, {1: 0.4}]) == {1: (mean, spread)}
    alone, nothing = mean_over_seeds(np.array([[0.5, 0.6]]))
    assert alone.tolist() == [0.5, 0.6]
    assert np.isnan(nothing).all()


def test_the_rows_of_a_model_are_found_by_one_function(tmp_path: Path) -> None:
    """The report's curve, the plots' rows and the accuracy curve are the same numbers."""
    result = rayfl.run(experiment(tmp_path, "fedavg"))
    opened, read = open_run(result.path, Experiment), load_run(result.path, METHODS)
    drawn = curve(read, RowKey("global"), "top1")
    assert drawn is not None
    rows = model_rows(opened, "global")
    assert drawn.values.tolist() == rows["top1"].to_pylist() == list(accuracy_curve(result.rounds, "global").values())
    assert drawn.rounds.tolist() == rows["round"].to_pylist() == [1, 2, 3, 4]


def test_a_row_is_called_the_same_in_every_table_and_legend() -> None:
    row = {"model": "lambda=best", "selected_on": "test per client", "choice": ""}
    assert label_of(row) == RowKey("lambda=best", "test per client").label == "lambda, by test per client *"
    assert label_of(row | {"choice": "lambda=0.5"}) == "lambda=0.5, by test per client *"
    assert label_of({"model": "lambda=1.0", "selected_on": "", "choice": None}) == RowKey("lambda=1.0").label
