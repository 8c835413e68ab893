"""Fed-TCGA-BRCA from small files of FLamby's layout: regions, parts, what is wrong in a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.opening import open_dataset
from rayfl.data.sources.preparation.preparing import Order
from rayfl.data.sources.tables.tcga_brca import TcgaBrcaSource
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams
from rayfl.runs.rows import where
from tests.support.field_files import brca_files


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """FLamby's folder; the data root is an empty folder."""
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    return brca_files(tmp_path / "fed_tcga_brca")


def test_regions_are_clients_with_flambys_parts_and_its_own_numbers(files: Path) -> None:
    with pytest.raises(DataError, match=r"brca.csv does not exist; get it with `rayfl data prepare tcga_brca`"):
        TcgaBrcaSource().open()
    TcgaBrcaSource().prepare(Order(place=str(files), offline=True))
    data = open_dataset(load_config(Experiment, "tcga-brca", []), RandomStreams(0))
    assert sorted(data.names) == sorted(("northeast", "south", "west", "midwest", "europe", "canada"))
    assert data.sizes().tolist() == [[24, 0, 6]] * 6 and data.spec.shape == (2,) and data.spec.target == "survival"
    south = data.load(data.names.index("south"))["train"]
    lines = [line.split(",") for line in (files / "brca.csv").read_text().splitlines()[1:]]
    mine = [line for number, line in enumerate(lines) if number % 6 == 1 and number % 5]
    assert south.x[:, 0].tolist() == [float(line[1]) for line in mine], "the age, in years"
    assert south.y.tolist() == [[float(line[4]), float(line[3])] for line in mine], "days, and whether they died then"
    wanted = load_config(Experiment, "tcga-brca", ["dataset.standardize=global"])
    ages = np.concatenate([open_dataset(wanted, RandomStreams(0)).load(k)["train"].x.numpy() for k in range(6)])
    assert abs(ages[:, 0].mean()) < 1e-5 and set(ages[:, 1]) == {0, 1}


@pytest.mark.slow
def test_the_preset_learns_the_risk_of_made_up_patients(files: Path, tmp_path: Path) -> None:
    TcgaBrcaSource().prepare(Order(place=str(files), offline=True))
    changes = {"cluster.backend": "inline", "tracking.tensorboard": False, "dataset.standardize": "global"}
    result = rayfl.run("tcga-brca", storage_path=str(tmp_path), name="run", **changes)
    (row,) = where(result.rounds, round=5, cohort="all", split="test").to_pylist()
    assert row["clients"] == 6 and row["pooled_c_index"] > 0.7


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("brca.csv", "pid,", "id,", r"brca.csv has no column 'pid', only id, age_at_index"),
        ("brca.csv", "TCGA-7,", "TCGA-8,", r"must have each patient once, but not so TCGA-[78]; get both again"),
        ("brca.csv", ",0.0,", ",3.0,", r"column 'E', row \d+ \(client '\w+'\) is 3.0; it must be 1"),
        ("dataset_creation_scripts/train_test_split.csv", "train_1", "train_6", r"fold is 'train' and fold2 'train_6'"),
        ("dataset_creation_scripts/train_test_split.csv", "test,test_", "dev,dev_", r"fold is 'dev' and fold2 'dev_"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(file: str, old: str, new: str, words: str, files: Path) -> None:
    (files / file).write_text((files / file).read_text().replace(old, new))
    with pytest.raises(DataError, match=words):
        TcgaBrcaSource().prepare(Order(place=str(files), offline=True))
