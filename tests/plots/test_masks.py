"""The figure of masks: it shows what models predict, of the right slice, and refuses runs that cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rayfl
from algorithms.registry import Experiment
from rayfl.errors import ConfigError
from rayfl.metrics.language import IGNORED
from rayfl.plots.kinds import KINDS
from rayfl.plots.output import write_plot
from rayfl.plots.style import SIZES, paper_style
from rayfl.runs.committed import CommittedModels
from rayfl.runs.folder import RunFolder, open_run
from tests.plots.conftest import Runs
from tests.plots.test_text_fits import faults

SMALL = {
    "dataset.num_clients": 5, "dataset.side": 8, "model.depth": 1, "train.rounds": 2, "train.clients_per_round": 3,
    "evaluation.every": 1, "cluster.backend": "inline",
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "superfed": {"algorithm": {"name": "superfed", "mode": "mm", "start": 0.5}},
    "fedavg": {"algorithm": "fedavg"},
    "other": {"algorithm": "fedper", "dataset.samples": 15},
    "volumes": {"algorithm": "fedavg", "dataset.dimensions": 3, "dataset.samples": 10},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunFolder]:
    folder = tmp_path_factory.mktemp("runs")
    for name, own in RUNS.items():
        rayfl.run("quickstart-segmentation", storage_path=str(folder), name=name, **{**SMALL, **own})
    return {name: open_run(str(folder / name), Experiment) for name in RUNS}


def images(axes: Any) -> np.ndarray:
    (image,) = axes.get_images()
    return np.ma.filled(image.get_array(), IGNORED)


@pytest.mark.slow
def test_what_is_drawn_is_what_the_models_predict(runs: dict[str, RunFolder]) -> None:
    both = [runs["superfed"], runs["fedavg"]]
    figure, table = KINDS["masks"].draw(both, clients=[3], samples=2)
    assert [row["series"] for row in table.to_pylist()] == ["SuPerFed", "FedAvg"] * 2
    models = CommittedModels(both[1])
    drawn, predictor = models.pooled("test", 2, [3]), models.predictor(3, "global")
    panels = [axes for axes in figure.axes if axes.get_images()]
    assert len(panels) == 8
    for line in range(2):
        with torch.no_grad():
            found = predictor.predictions(predictor.built(), drawn.x[line : line + 1], models.parts.task)
        predicted, mask = found[0].argmax(-1).numpy(), drawn.y[line].numpy()
        source, truth, _, last = panels[4 * line : 4 * line + 4]
        x = drawn.x[line, 0].numpy()
        np.testing.assert_allclose(images(source), (x - x.min()) / (x.max() - x.min()))
        np.testing.assert_array_equal(images(truth), mask)
        np.testing.assert_array_equal(images(last), predicted)
        shares = [
            2 * ((predicted == c) & (mask == c)).sum() / ((predicted == c).sum() + (mask == c).sum())
            for c in range(3)
            if (predicted == c).any() or (mask == c).any()
        ]
        assert table.to_pylist()[2 * line + 1]["dice"] == pytest.approx(np.mean(shares))
        assert last.get_xlabel() == f"Dice {100 * np.mean(shares):.0f} %"


def test_clients_are_the_worst_the_middle_and_the_best(runs: dict[str, RunFolder], tmp_path: Path) -> None:
    run = runs["fedavg"]
    rows = [row for row in run.clients.to_pylist() if (row["round"], row["split"], row["cohort"]) == (2, "test", "all")]
    ranked = [row["client"] for row in sorted(rows, key=lambda row: row["dice"]) if row["model"] == "global"]
    numbers = write_plot("masks", [run], tmp_path / "masks.pdf", size="icml-column")
    lines = numbers.read_text(encoding="utf-8").splitlines()
    column = lines[0].replace('"', "").split(",").index("client")
    assert [int(line.split(",")[column]) for line in lines[1:]] == [ranked[0], ranked[len(ranked) // 2], ranked[-1]]


def test_of_a_volume_the_fullest_slice_is_drawn(runs: dict[str, RunFolder]) -> None:
    figure, table = KINDS["masks"].draw([runs["volumes"]], clients=[0])
    mask = CommittedModels(runs["volumes"]).pooled("test", 1, [0]).y[0].numpy()
    fullest = max(range(mask.shape[-1]), key=lambda at: int((mask[..., at] > 0).sum()))
    np.testing.assert_array_equal(images(figure.axes[1]), mask[..., fullest])
    assert table.num_rows == 1


def test_voxels_that_count_nowhere_make_no_slice_full(
    runs: dict[str, RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = CommittedModels(runs["volumes"]).pooled("test", 1, [0])
    drawn.y.zero_()
    drawn.y[..., 1], drawn.y[..., 0, 0, 2] = IGNORED, 1
    monkeypatch.setattr(CommittedModels, "pooled", lambda *_: drawn)
    figure, _ = KINDS["masks"].draw([runs["volumes"]], clients=[0])
    np.testing.assert_array_equal(images(figure.axes[1]), drawn.y[0, ..., 2].numpy())


def test_pixels_that_count_nowhere_are_white(runs: dict[str, RunFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    models = CommittedModels(runs["fedavg"])
    drawn = models.pooled("test", 1, [0])
    drawn.y[0, 0, 0] = IGNORED
    monkeypatch.setattr(CommittedModels, "pooled", lambda *_: drawn)
    figure, _ = KINDS["masks"].draw([runs["fedavg"]], clients=[0])
    image = figure.axes[1].get_images()[0]
    hidden = np.ma.getmaskarray(np.ma.asarray(image.get_array()))
    assert hidden[0, 0] and not hidden[0, 1]
    assert tuple(image.cmap.get_bad()) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    "size", [pytest.param("", marks=pytest.mark.slow), "icml-column", pytest.param("neurips", marks=pytest.mark.slow)]
)
def test_every_text_of_it_can_be_read(runs: dict[str, RunFolder], size: str) -> None:
    with paper_style(SIZES[size] if size else None):
        figure, _ = KINDS["masks"].draw([runs["superfed"], runs["fedavg"]])
        assert faults(figure) == []


def test_what_cannot_be_drawn_is_refused(runs: dict[str, RunFolder], made: Runs, tmp_path: Path) -> None:
    def refused(why: str, *given: RunFolder, **options: Any) -> None:
        with pytest.raises(ConfigError, match=why):
            write_plot("masks", given, tmp_path / "masks.png", **options)

    refused("is a run of classification; masks is of runs with task=segmentation", made("fedavg"))
    refused(r"client \d has other samples in .*other than in .*fedavg", runs["fedavg"], runs["other"])
    refused("there is no client 5 in .*numbered 0 to 4", runs["fedavg"], clients=[5])
    refused("--split: masks has no 'official'; there are test, validation, train", runs["fedavg"], split="official")
    refused("fedavg has no model 'local'", runs["fedavg"], model="local", clients=[0])
    refused("--samples: at least one", runs["fedavg"], samples=0)
    refused("has room for 4 of 5 panels", runs["fedavg"], runs["superfed"], runs["other"], size="icml-column")
    assert not list(tmp_path.iterdir())
