"""What runs know of earlier stages: as a figure, in a report, and at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rayfl
from algorithms.registry import METHODS, Experiment
from rayfl.errors import ConfigError
from rayfl.plots.stages import draw
from rayfl.report.stages import section
from rayfl.runs.finding import load_run
from rayfl.runs.folder import RunFolder, open_run
from rayfl.runs.further import stage_table
from tests.support.experiments import small_experiment

STAGES = {"name": "classes", "count": 2, "rounds": 2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of two stages, of two seeds and with a memory; of one stage so far; and without stages."""
    path = tmp_path_factory.mktemp("stages")
    everybody: dict[str, Any] = {"partition": {"name": "iid", "num_clients": 5}}
    runs: dict[str, dict[str, Any]] = {
        "first": {"seed": 0},
        "second": {"seed": 1},
        "kept": {"stages": {**STAGES, "memory": 20}},
        "begun": {"stages": {**STAGES, "rounds": 9}},
        "plain": {"stages": {"name": "none"}},
    }
    for name, changes in runs.items():
        rayfl.run(small_experiment(path, name, "fedprox", backend="inline") | everybody | {"stages": STAGES} | changes)
    return {name: path / name for name in ("first", "second", "kept", "begun", "plain")}


def opened(folders: dict[str, Path], *names: str) -> list[RunFolder]:
    return [open_run(str(folders[name]), Experiment) for name in names]


def rows(folder: Path, round: int, split: str) -> float:
    table = load_run(str(folder), METHODS).rounds.to_pylist()
    (found,) = (
        row["top1"]
        for row in table
        if (row["round"], row["split"], row["cohort"], row["model"]) == (round, split, "all", "global")
    )
    return float(found)


@pytest.mark.slow
def test_a_panel_is_the_mean_over_seeds_of_what_the_tables_have(folders: dict[str, Path]) -> None:
    figure, numbers = draw(opened(folders, "first", "second", "kept"))
    found = numbers.to_pylist()
    assert len(figure.axes) == 2 and [(row["after"], row["of"]) for row in found] == [(1, 1), (2, 1), (2, 2)] * 2
    for row in found[:3]:
        split = f"stage_{row['of']}"
        both = [rows(folders[name], 2 * row["after"], split) for name in ("first", "second")]
        assert row["top1"] == pytest.approx(np.mean(both))
    assert {text.get_text() for text in figure.axes[1].texts} == {f"{100 * row['top1']:.1f}" for row in found[3:]}


def test_what_cannot_be_drawn_is_refused_by_name(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="plain has no scores by stage"):
        draw(opened(folders, "plain"))
    with pytest.raises(ConfigError, match="runs have 1 and 2 stages"):
        draw(opened(folders, "first", "begun"))
    with pytest.raises(ConfigError, match="there is no 'accuracy'"):
        draw(opened(folders, "first"), metric="accuracy")


def test_reports_and_the_end_of_a_run_have_the_table(folders: dict[str, Path]) -> None:
    run = load_run(str(folders["kept"]), METHODS)
    table, facts = section(run)
    shown = [f"{100 * rows(folders['kept'], *place):.2f}" for place in ((2, "stage_1"), (4, "stage_1"), (4, "stage_2"))]
    assert table.kind == "table" and [[cell.text for cell in row] for row in table.rows] == [
        ["1", shown[0], ""],
        ["2", *shown[1:]],
    ]
    assert facts.kind == "facts" and [name for name, _ in facts.pairs] == ["Average", "Forgetting", "Backward transfer"]
    mean = np.mean([rows(folders["kept"], 4, split) for split in ("stage_1", "stage_2")])
    assert facts.pairs[0][1] == f"{100 * mean:.2f} %"
    assert not section(load_run(str(folders["plain"]), METHODS))
    result = rayfl.run(small_experiment(folders["plain"].parent, "again", "fedprox", backend="inline"))
    assert stage_table(result) is None
