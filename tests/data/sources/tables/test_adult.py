"""Adult: people of two files in the UCI repository's layout, with groups by sex or race."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.opening import open_dataset
from rayfl.data.sources.preparation.preparing import Order
from rayfl.data.sources.tables.adult import AdultSource
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

PERSON = "{}, {}, 77516, Bachelors, 13, Never-married, Sales, Not-in-family, {}, {}, {}, 0, 40, United-States, {}{}\n"


def files(folder: Path, people: int = 24) -> Path:
    """Both files, with people of whom nothing is missing, and one of whom something is."""
    folder.mkdir()
    texts = {"adult.data": "", "adult.test": "|1x3 Cross validator\n"}
    for row in range(people):
        name, end = ("adult.data", "") if 3 * row < 2 * people else ("adult.test", ".")
        sex, race = "Male" if row % 3 else "Female", ("White", "Black", "Other")[row % 3]
        about = (20 + row % 60, "Private" if row % 2 else "State-gov", race, sex, 100 * row)
        texts[name] += PERSON.format(*about, ">50K" if row % 4 == 0 else "<=50K", end)
    texts["adult.data"] += PERSON.format(99, "?", "White", "Male", 0, "<=50K", "") + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def test_it_is_a_table_with_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"adult\.data cannot be read.*rayfl data prepare adult"):
        AdultSource().open()
    AdultSource().prepare(Order(place=str(files(tmp_path / "mine")), offline=True))
    samples = AdultSource(group="race").open()
    assert samples.table is not None and samples.table.columns.people == ("Black", "Other", "White")
    assert samples.y.tolist() == [int(row % 4 == 0) for row in range(24)]
    np.testing.assert_array_equal(samples.grouped(), [(2, 0, 1)[row % 3] for row in range(24)])
    row = dict(zip(samples.table.columns.names, np.asarray(samples.x)[1], strict=False))
    assert (row["age"], row["capital-gain"], row["workclass=Private"], row["race=Black"]) == (21, 100, 1, 1)
    assert "fnlwgt" not in row
    overrides = ["dataset={name: adult, group_input: false}", "model=tabular_mlp", "algorithm=fedavg"]
    overrides += ["partition={name: dirichlet, by: group, num_clients: 2, alpha: 5, min_samples: 4}"]
    data = open_dataset(load_config(Experiment, "quickstart", overrides), RandomStreams(0))
    assert data.spec.groups == ("Female", "Male") and data.spec.shape == (5 + 2 + 4 * 1 + 3 + 1,)
    train = data.load(0)["train"]
    assert train.group is not None and len(train.group) == len(train.y)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1, 2", r"adult\.test, line 2: 2 fields, not 15"),
        (PERSON.format(20, "Private", "White", "Male", 0, "50K", ""), "the income is '50K'"),
        (PERSON.format("old", "Private", "White", "Male", 0, "<=50K", ""), "line 2: could not convert"),
    ],
)
def test_what_is_not_its_layout_is_refused(tmp_path: Path, line: str, message: str) -> None:
    folder = files(tmp_path / "adult")
    (folder / "adult.test").write_text("|1x3 Cross validator\n" + line)
    with pytest.raises(DataError, match=message):
        AdultSource(root=tmp_path).open()
