"""What users do with runs of segmentation: compare, report, export, replay; held-out clients, a centralized model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from typer.testing import CliRunner

import rayfl
from algorithms.registry import METHODS as REGISTERED
from rayfl.cli.entry import app
from rayfl.report.comparison import compare
from rayfl.runs.finding import load_run

SMALL = {
    "dataset.num_clients": 6,
    "dataset.side": 8,
    "model.depth": 1,
    "train.rounds": 2,
    "train.clients_per_round": 3,
    "evaluation.every": 1,
    "cluster.backend": "inline",
}
HELD_OUT = {"evaluation.unseen_clients": 0.34, "task.background": False}
RUNS: dict[str, dict[str, Any]] = {
    "ditto": HELD_OUT,
    "superfed": {"algorithm": {"name": "superfed", "mode": "mm", "start": 0.5}, **HELD_OUT},
    "centralized": {"algorithm": "centralized"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name, own in RUNS.items():
        rayfl.run("quickstart-segmentation", storage_path=str(folder), name=name, **{**SMALL, **own})
    return {name: folder / name for name in RUNS}


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, f"{done.output}{done.exception}"
    return done.output


@pytest.mark.slow
def test_a_comparison_takes_the_highest_dice_for_the_best(runs: dict[str, Path], tmp_path: Path) -> None:
    both = [load_run(str(runs[name]), REGISTERED) for name in ("ditto", "superfed")]
    comparison = compare(both)
    assert [metric.column for metric in comparison.wanted.metrics][:3] == ["dice", "dice_worst5", "iou"]
    eligible = [line.cells["dice"] for line in comparison.lines if line.eligible]
    assert [cell.best for cell in eligible] == [cell.mean == max(cell.mean for cell in eligible) for cell in eligible]
    said("report", str(runs["ditto"]), str(runs["superfed"]), "--out", str(tmp_path / "both"))
    page = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert "Dice of the methods" in page and "ccuracies" not in page


@pytest.mark.parametrize("kind", ["curves", "clients", "lambda"])
@pytest.mark.slow
def test_figures_show_dice(kind: str, runs: dict[str, Path], tmp_path: Path) -> None:
    said("plot", kind, str(runs["superfed"]), "--out", str(tmp_path / "figure.png"))
    assert "dice" in (tmp_path / "figure.csv").read_text(encoding="utf-8").splitlines()[0]


def test_clients_held_out_and_a_centralized_model_are_scored(runs: dict[str, Path]) -> None:
    rounds = load_run(str(runs["ditto"]), REGISTERED).rounds
    unseen = rounds.filter((pc.field("cohort") == "unseen") & (pc.field("split") == "test"))
    assert set(unseen["clients"].to_pylist()) == {2} and all(0 <= dice <= 1 for dice in unseen["dice"].to_pylist())
    central = load_run(str(runs["centralized"]), REGISTERED).rounds
    assert max(central["round"].to_pylist()) == 2 and max(central["pooled_dice"].to_pylist()) > 0


def test_an_exported_model_scores_what_the_table_says(runs: dict[str, Path], tmp_path: Path) -> None:
    text = said("export", str(runs["ditto"]), "--client", "1", "--out", str(tmp_path / "model.safetensors"))
    exported = float(re.search(r"test: dice ([\d.]+)", text)[1])  # type: ignore[index]
    row = load_run(str(runs["ditto"]), REGISTERED).clients.filter(
        (pc.field("client") == 1)
        & (pc.field("cohort") == "all")
        & (pc.field("split") == "test")
        & (pc.field("round") == 2)
        & (pc.field("model") == "personalized")
    )
    assert row["dice"].to_pylist() == pytest.approx([exported], abs=1e-4)
    assert (tmp_path / "model.safetensors").stat().st_size > 0


def test_an_update_is_replayed_bit_by_bit(runs: dict[str, Path]) -> None:
    refused = CliRunner().invoke(app, ["replay", str(runs["ditto"]), "--round", "2", "--client", "99"]).exception
    client = re.findall(r"\d+", str(refused).split(":")[-1])[0]
    assert "equal to the bit" in said("replay", str(runs["ditto"]), "--round", "2", "--client", client)
