"""The options ``task.loss`` and ``task.background`` train and score as they say, in whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from typer.testing import CliRunner

import rayfl
from algorithms.registry import METHODS, Experiment
from rayfl.cli.entry import app
from rayfl.config.loading import load_config
from rayfl.experiment.parts import Parts
from rayfl.models.networks.unet import UNetModel
from rayfl.runs.finding import load_run
from tests.tasks.test_segmentation import SMALL

CHOICES = [
    (loss, background) for loss in ("cross_entropy", "dice", "cross_entropy_dice") for background in (True, False)
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """By loss and background, the folder of a run that FedAvg has trained."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for loss, background in CHOICES:
        name = f"{loss}-{background}"
        own = {
            "train.rounds": 1,
            "train.local_epochs": 1,
            "algorithm": "fedavg",
            "task.loss": loss,
            "task.background": background,
        }
        rayfl.run("quickstart-segmentation", storage_path=str(folder), name=name, **{**SMALL, **own})
        found[loss, background] = folder / name
    return found


def exported(run: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The server's model, which is also that of a client: its tensors, and the section of its configuration."""
    place = run / "model.safetensors"
    if not place.exists():
        done = CliRunner().invoke(app, ["export", str(run), "--client", "1", "--out", str(place)])
        assert done.exit_code == 0, done.output
    with safe_open(place, "pt") as file:
        names = list(file.keys())
        return {name: file.get_tensor(name) for name in names}, json.loads(file.metadata()["rayfl"])["model"]


def dice_of(found: Tensor, truth: Tensor, first: int, smooth: float) -> Tensor:
    """Mean over classes from ``first`` on of 2 sum(p t) / (sum(p) + sum(t)); without smoothing of those that occur."""
    shares = []
    for label in range(first, found.shape[-1]):
        has = (truth == label).double()
        size = found[..., label].sum() + has.sum()
        if size > 0 or smooth:
            shares.append((2 * (found[..., label] * has).sum() + smooth) / (size + smooth))
    return torch.stack(shares).mean()


@pytest.mark.parametrize(("loss", "background"), CHOICES)
@pytest.mark.first_case
def test_the_table_has_the_loss_and_the_overlap_that_were_asked_for(
    loss: str, background: bool, runs: dict[tuple[str, bool], Path]
) -> None:
    tensors, section = exported(runs[loss, background])
    run = load_run(str(runs[loss, background]), METHODS)
    dataset = Parts(load_config(Experiment, runs[loss, background] / "config.yaml", {})).dataset
    model = UNetModel(**section).build(dataset.spec)
    model.load_state_dict(tensors)
    first = 0 if background else 1
    scored = (pc.field("split") == "test") & (pc.field("round") == 1) & (pc.field("cohort") == "all")
    rows = run.clients.filter(scored & (pc.field("model") == "global")).to_pylist()
    assert len(rows) == dataset.num_clients
    for row in rows:
        test = dataset.load(row["client"])["test"]
        logs = model(test.x).detach().double().log_softmax(-1)
        entropy = -logs.gather(-1, test.y[..., None]).mean((1, 2, 3))
        soft = torch.stack(
            [1 - dice_of(one.exp(), truth, first, 1e-5) for one, truth in zip(logs, test.y, strict=True)]
        )
        losses = {"cross_entropy": entropy, "dice": soft, "cross_entropy_dice": entropy + soft}
        assert row["loss"] == pytest.approx(losses[loss].mean().item(), rel=1e-4)
        said = torch.nn.functional.one_hot(logs.argmax(-1), logs.shape[-1]).double()
        assert row["dice"] == pytest.approx(dice_of(said, test.y, first, 0).item(), rel=1e-5)


@pytest.mark.parametrize("loss", ["cross_entropy", "dice", "cross_entropy_dice"])
def test_background_changes_training_only_where_the_loss_has_overlaps(
    loss: str, runs: dict[tuple[str, bool], Path]
) -> None:
    (one, _), (other, _) = (exported(runs[loss, background]) for background in (True, False))
    assert all(torch.equal(one[name], other[name]) for name in one) == (loss == "cross_entropy")


def test_each_loss_trains_a_model_of_its_own(runs: dict[tuple[str, bool], Path]) -> None:
    first, *others = (exported(runs[loss, True])[0] for loss in ("cross_entropy", "dice", "cross_entropy_dice"))
    assert all(any(not torch.equal(first[name], other[name]) for name in first) for other in others)
