"""What it took to reach a score: rounds, bytes, seconds; seeds that never reached it, formats, refusals."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rayfl
from algorithms.registry import METHODS
from rayfl.cli.entry import app
from rayfl.errors import ConfigError
from rayfl.report.columns import columns_of
from rayfl.report.comparison import compare
from rayfl.report.lines import Wanted
from rayfl.report.reaching import Reaching
from rayfl.report.several import keys_of
from rayfl.runs.finding import load_runs
from rayfl.runs.loading import Run
from rayfl.runs.rows import where
from tests.support.experiments import small_experiment

RUNS = (("a", "ditto", 0, "sampled"), ("b", "ditto", 1, "sampled"), ("c", "hypcluster", 0, "none"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ditto with two seeds on simulated devices, and HypCluster with one on none."""
    folder = tmp_path_factory.mktemp("runs")
    for name, method, seed, system in RUNS:
        made = small_experiment(folder, name, method, backend="inline")
        rayfl.run({**made, "seed": seed, "system": {"name": system}, "evaluation": {"every": 1}})
    return folder


def loaded(folder: Path, *names: str) -> list[Run]:
    return load_runs([str(folder / name) for name in names], METHODS)


def course(run: Run, model: str = "personalized") -> list[dict[str, Any]]:
    found = where(run.rounds, cohort="all", split="test", model=model, phase="received").sort_by("round").to_pylist()
    assert len(found) == 4
    return found


def found_of(runs: list[Run], score: float, column: str = "top1") -> tuple[Any, list[str]]:
    """The line of Ditto's personalized models, and the notes."""
    comparison = compare(runs, Wanted())
    lines, notes = Reaching(columns_of(runs)[column], score).found(comparison.groups, keys_of(comparison))
    return next(line for line in lines if line.model == "personalized"), notes


def line_of(runs: list[Run], score: float, column: str = "top1") -> Any:
    return found_of(runs, score, column)[0]


def test_the_first_evaluation_that_has_the_score_counts(folder: Path) -> None:
    (run,) = loaded(folder, "a")
    rows = course(run)
    score = rows[1]["top1"]
    first = next(row for row in rows if row["top1"] >= score)
    found = line_of([run], score)
    assert (found.reached, found.seeds) == (1, 1)
    assert found.costs["rounds"].mean == first["round"]
    assert found.costs["bytes_sent"].mean == first["bytes_down"] + first["bytes_up"]
    assert found.costs["simulated_s"].mean == first["simulated_s"]
    spent = sum(one["client_seconds"] for one in run.costs if one["round"] <= first["round"])
    assert found.costs["client_seconds"].mean == pytest.approx(spent)
    assert found.costs["flops"] is None


def test_what_is_sent_is_down_and_up(folder: Path) -> None:
    (run,) = loaded(folder, "c")
    first = course(run)[0]
    assert first["bytes_down"] > first["bytes_up"]  # all clusters' models, and one
    assert line_of([run], 0.0).costs["bytes_sent"].mean == first["bytes_down"] + first["bytes_up"]


def test_less_loss_is_better(folder: Path) -> None:
    (run,) = loaded(folder, "a")
    rows = course(run)
    score = min(row["loss"] for row in rows)
    first = next(row["round"] for row in rows if row["loss"] <= score)
    assert line_of([run], score, "loss").costs["rounds"].mean == first
    assert line_of([run], score - 1e-9, "loss").reached == 0


def test_numbers_are_of_the_seeds_that_have_reached_it(folder: Path) -> None:
    runs = loaded(folder, "a", "b")
    low, high = sorted(max(row["top1"] for row in course(run)) for run in runs)
    assert low < high
    some, notes = found_of(runs, (low + high) / 2)
    assert notes == ["Where not all seeds have reached it, the numbers are those of the seeds that have."]
    assert (some.reached, some.seeds) == (1, 2) and some.costs["rounds"].std is None
    both, notes = found_of(runs, 0.0)
    assert not notes and (both.reached, both.costs["rounds"].mean, both.costs["rounds"].std) == (2, 1, 0)
    nobody = line_of(runs, 1.0)
    assert (nobody.reached, nobody.seeds) == (0, 2) and not any(nobody.costs.values())
    runs[1].costs.clear()
    some_know = line_of(runs, 0.0)
    assert some_know.costs["client_seconds"] is None and some_know.costs["rounds"] == both.costs["rounds"]


def invoked(folder: Path, *options: str) -> Any:
    runs = [str(folder / name) for name, *_ in RUNS]
    return CliRunner().invoke(app, ["compare", *runs, "--about", "target", *options])


def test_every_format_has_the_numbers(folder: Path) -> None:
    content = json.loads(invoked(folder, "--target", "10%", "--json").stdout)
    assert content["schema"] == "rayfl.compare-target/1"
    row = next(row for row in content["rows"] if row["model"] == "personalized")
    assert (row["metric"], row["target"], row["seeds"]) == ("top1", 0.1, 2)
    table = list(csv.DictReader(io.StringIO(invoked(folder, "--target", "0.1", "--format", "csv").stdout)))
    assert [float(line["rounds"] or 0) for line in table] == [row["rounds"] or 0 for row in content["rows"]]
    assert "virtual time (h)" in invoked(folder, "--target", "10%", "--format", "markdown").stdout
    assert r"\toprule" in invoked(folder, "--target", "10%", "--format", "latex").stdout
    assert "until accuracy was at least 10 %" in " ".join(invoked(folder, "--target", "10%").output.split())
    worst = " ".join(invoked(folder, "--target", "10%", "--metric", "top1_worst5").output.split())
    assert "until worst 5 % was at least 10 %: " in worst and "mean over" not in worst.partition(";")[0], worst
    lowest = " ".join(invoked(folder, "--target", "0", "--metric", "loss").output.split())
    assert "until loss was at most 0:" in lowest and "0 of 2" in lowest and "rounds" in lowest


def test_evaluations_that_are_apart_are_named(tmp_path: Path) -> None:
    made = small_experiment(tmp_path, "sparse", "fedavg", backend="inline")
    run = rayfl.run({**made, "evaluation": {"every": 3}})
    comparison = compare(load_runs([run.path], METHODS), Wanted())
    reaching = Reaching(columns_of(comparison.groups[0].runs)["top1"], 0.1)
    _, notes = reaching.found(comparison.groups, keys_of(comparison))
    assert any("up to 3 rounds apart" in note for note in notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "80"], r"--target 80: top1 \(accuracy %\) is a fraction"),
        (["--target", "many"], r"--target many: top1"),
        pytest.param(["--target", "50%%"], r"--target 50%%: top1", marks=pytest.mark.slow),
        (["--target", "inf", "--metric", "loss"], r"a number in its own unit"),
        (["--target", "50%", "--metric", "top1_best_round"], r"--metric top1_best_round: a, b, c did not record it"),
        pytest.param(["--target", "50%", "--metric", "loss"], r"a number in its own unit", marks=pytest.mark.slow),
        (["--target", "0.5", "--metric", "loss", "--metric", "ece"], r"one --metric"),
        pytest.param([], r"go together", marks=pytest.mark.slow),
    ],
)
def test_what_is_no_target_is_refused(folder: Path, options: list[str], message: str) -> None:
    error = invoked(folder, *options).exception
    assert isinstance(error, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise error
