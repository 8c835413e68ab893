"""The presets of single data sets run on small files of the official layouts: a few rounds, to finite scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import rayfl
from algorithms.registry import Experiment
from cluster.run import run_config
from rayfl.config.loading import load_config, preset_names
from tests.support.preset_files import PRESETS

QUICK = ("heart-disease", "stackoverflow-nwp")
"""They stand for the others, which are tables and texts or images, too."""


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PRESETS]
)
def test_a_preset_runs_on_files_of_the_official_layout(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    make, changes = PRESETS[preset]
    make(tmp_path, monkeypatch)
    fewer = ["train.rounds=2", "evaluation.every=1", "cluster.backend=inline", "tracking.tensorboard=false"]
    run_config(load_config(Experiment, preset, [*fewer, *changes, f"storage_path={tmp_path}", "name=run"]))
    rounds = pq.read_table(tmp_path / "run" / "rounds.parquet").to_pandas()
    assert rounds["round"].max() == 2 and np.isfinite(rounds["pooled_loss"].dropna()).all()
    assert len(rounds["pooled_loss"].dropna()) >= 2


def test_every_preset_says_whether_it_was_run() -> None:
    root = Path(rayfl.__file__).parent / "presets"
    for name in PRESETS:
        comment = next(iter((root / f"{name}.yaml").read_text(encoding="utf-8").split("\n# Settings")))
        assert name == "synthetic" or ", not run on " in " ".join(comment.split("\n# ")), name
        assert name in preset_names()
        load_config(Experiment, name, [])


def test_every_data_set_of_flamby_has_a_preset_that_says_where_its_settings_are_from() -> None:
    package = Path(rayfl.__file__).parent
    page = (package.parent / "docs" / "data.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| Fed-")]
    assert [row[0].strip().removeprefix("Fed-") for row in rows] == [
        *("Heart-Disease", "ISIC2019", "TCGA-BRCA", "IXI", "KiTS19", "LIDC-IDRI", "Camelyon16"),
    ]
    for _, _, about in rows:
        name = about.partition("preset `")[2].partition("`")[0]
        head = (package / "presets" / f"{name}.yaml").read_text(encoding="utf-8").partition("\ndataset:")[0]
        assert name in PRESETS and "# Settings: " in head and ("config_" in head or "fed_" in head), name
