"""UCI HAR from small files of the official layout: people, parts, signals and features, what is wrong in a file."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.opening import open_dataset
from rayfl.data.sources.official import open_official_test
from rayfl.data.sources.preparation.inventory import inventory, verify
from rayfl.data.sources.preparation.preparing import Order
from rayfl.data.sources.tables.har import HarSource
from rayfl.errors import ConfigError, DataError
from rayfl.randomness import RandomStreams
from tests.support.har_files import Parts, har_files, har_zip
from tests.support.server import Server


def whole(found: Parts, what: str) -> np.ndarray:
    return np.concatenate([found["train"][what], found["test"][what]])


@pytest.mark.parametrize("inputs", ["signals", "features"])
def test_people_are_clients_and_both_parts_are_pooled(tmp_path: Path, root: Path, inputs: str) -> None:
    found = har_files(tmp_path / "UCI HAR Dataset")
    with pytest.raises(DataError, match=r"UCI HAR Dataset.zip exists, nor all .* `rayfl data prepare har` \(add --sou"):
        HarSource().open()
    source = HarSource(inputs=inputs)
    prepared = source.prepare(Order(place=str(tmp_path), offline=True))
    assert verify(prepared) == ([], []) and source.class_names()[5] == "laying"
    dataset = [f"dataset={{name: har, inputs: {inputs}}}", "partition=natural", "holdout.test=0.25", "model=two_nn"]
    data = open_dataset(load_config(Experiment, "quickstart", dataset), RandomStreams(0))
    assert data.names == ("subject_01", "subject_02", "subject_03", "subject_10", "subject_11")
    assert data.spec == source.known_spec
    assert data.sizes().sum(1).tolist() == [12] * 5 and set(data.sizes()[:, 2].tolist()) == {3}
    x, y, people = (whole(found, what) for what in (inputs, "y", "people"))
    for name, client in zip((1, 2, 3, 10, 11), range(5), strict=True):
        own = people == name
        places = data.places(client)
        for split, examples in data.load(client).items():
            at = np.flatnonzero(own)[places[split]] if len(places[split]) else np.empty(0, np.int64)
            assert examples.y.tolist() == (y[at] - 1).tolist()
            np.testing.assert_allclose(examples.x.numpy().reshape(len(at), *x.shape[1:]), x[at], rtol=1e-6, atol=1e-9)
    (warned,) = data.remarks()
    assert "the files of har have 60 samples (part=both), but the official ones have 10299" in warned


def test_a_channel_is_a_signal(tmp_path: Path, root: Path) -> None:
    found = har_files(tmp_path / "UCI HAR Dataset", windows=4)
    HarSource().prepare(Order(place=str(tmp_path / "UCI HAR Dataset")))
    config = ["dataset=har", "partition=natural", "holdout={test: 0, validation: 0}", "model=har_cnn"]
    data = open_dataset(load_config(Experiment, "quickstart", config), RandomStreams(0))
    first = data.load(0)["train"].x
    assert first.shape == (4, 9, 1, 128)
    np.testing.assert_allclose(first[0, :, 0], found["train"]["signals"][0], rtol=1e-6, atol=1e-9)
    scaled = open_dataset(
        load_config(Experiment, "quickstart", [*config, "transform.normalize=dataset"]), RandomStreams(0)
    )
    every = np.concatenate([scaled.load(client)["train"].x.numpy() for client in range(5)])
    assert abs(every.mean((0, 2, 3))).max() < 1e-5 and abs(every.std((0, 2, 3)) - 1).max() < 1e-4


def test_the_official_test_part_is_of_other_people(tmp_path: Path, root: Path) -> None:
    found = har_files(tmp_path / "UCI HAR Dataset")
    HarSource().prepare(Order(place=str(tmp_path)))
    plain = ["dataset={name: har, inputs: features, part: train}", "partition=natural", "model=two_nn"]
    HarSource(inputs="features").prepare(Order(place=str(tmp_path)))
    config = load_config(Experiment, "quickstart", plain)
    data = open_dataset(config, RandomStreams(0))
    assert data.names == ("subject_01", "subject_03", "subject_11")
    official = open_official_test(config.dataset, data, RandomStreams(0))
    assert len(official) == 24
    # the file is in the order of people
    order = np.argsort(found["test"]["people"], kind="stable")
    assert official.load(0, 24).y.tolist() == (found["test"]["y"][order] - 1).tolist()
    both = load_config(Experiment, "quickstart", [*plain, "dataset.part=both"])
    with pytest.raises(ConfigError, match=r"dataset\.part is both, so the clients have the test samples themselves"):
        open_official_test(both.dataset, open_dataset(both, RandomStreams(0)), RandomStreams(0))


@pytest.mark.parametrize("wrapped", [True, False])
def test_from_a_zip_file_of_its_authors_or_of_uci(tmp_path: Path, root: Path, server: Server, wrapped: bool) -> None:
    har_files(tmp_path / "UCI HAR Dataset", windows=2)
    archive = har_zip(tmp_path / "UCI HAR Dataset", tmp_path / "mine.zip", wrapped)
    source = HarSource(inputs="features")
    with pytest.raises(DataError, match=r"mine.zip has the sha256 \w{64}, but UCI HAR Dataset.zip has 2045e435c955"):
        source.prepare(Order(place=str(archive)))
    assert not list(root.rglob("*.zip")) and not list(root.rglob("*.arrow"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    with pytest.raises(DataError, match=r"mine\.zip has the sha256"):
        source.prepare(Order(place=str(archive), sha256="0" * 64))
    server.files["/har.zip"] = archive.read_bytes()
    source.prepare(Order(place=server.url("/har.zip"), sha256=digest))
    assert [file.name for file in root.glob("*.zip")] == ["UCI HAR Dataset.zip"]
    (entry,) = inventory(root)
    assert entry.content == "10 samples of 5 clients, 561, 6 classes"
    with pytest.raises(DataError, match=r"UCI HAR Dataset.zip is there and is what would be read; delete it"):
        source.prepare(Order(place=str(tmp_path / "UCI HAR Dataset")))
    with pytest.raises(DataError, match="--sha256 is for a single file"):
        source.prepare(Order(place=str(tmp_path / "UCI HAR Dataset"), sha256=digest))


def test_what_is_no_zip_file_or_not_there_is_named(tmp_path: Path, root: Path) -> None:
    (tmp_path / "mine.zip").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"har-download.zip is not a readable zip file"):
        HarSource().prepare(Order(place=str(tmp_path / "mine.zip")))
    with pytest.raises(DataError, match=r"nothing is downloaded offline; get https://archive.ics.uci.edu/static/publ"):
        HarSource().prepare(Order(offline=True))
    assert not list(root.rglob("*.zip"))


def test_the_unpacked_folder_in_the_data_root_is_read(root: Path) -> None:
    har_files(root / "UCI HAR Dataset", windows=2)
    HarSource().prepare(Order(offline=True))
    with pytest.raises(DataError, match="--sha256 is for a single file"):
        HarSource().prepare(Order(offline=True, sha256="0" * 64))
    shutil.rmtree(root / "UCI HAR Dataset" / "test")
    with pytest.raises(DataError, match="har is not there"):
        HarSource().open()


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("train/y_train.txt", r"\A1\n", "7\n", r"y_train.txt, row 0: the value 7 must be from 1 to 6"),
        ("train/y_train.txt", r"\A1\n", "", r"subject_train.txt has 36 rows, but train/y_train.txt has 35; get both"),
        ("test/subject_test.txt", r"10\n", "31\n", r"subject_test.txt, row 1: the value 31 must be from 1 to 30"),
        (
            "test/subject_test.txt",
            r"10\n",
            "3\n",
            r"the person 3 is in both parts, but the official files divide people",
        ),
        ("test/y_test.txt", r"\A1\n", "walking\n", r"y_test.txt: could not convert string 'walking' to int64"),
        ("test/X_test.txt", r"\A *\S+", " ", r"X_test.txt: the number of columns changed from 560 to 561"),
        ("test/X_test.txt", r" +\S+\n", "\n", r"X_test.txt has 560 numbers a row, not 561"),
        ("test/X_test.txt", r"\A *\S+", "nan", r"X_test.txt, row 0: the value nan must be finite"),
        ("test/X_test.txt", r"(?s)\A.*\Z", "", r"X_test.txt is empty; get it again"),
    ],
)
@pytest.mark.two_cases
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, root: Path, name: str, old: str, new: str, words: str
) -> None:
    har_files(tmp_path / "UCI HAR Dataset")
    file = tmp_path / "UCI HAR Dataset" / name
    file.write_text(re.sub(old, new, file.read_text()))
    with pytest.raises(DataError, match=words):
        HarSource(inputs="features").prepare(Order(place=str(tmp_path)))
    assert not list(root.rglob("*.arrow"))


def test_a_file_that_is_missing_is_named(tmp_path: Path, root: Path) -> None:
    folder = tmp_path / "UCI HAR Dataset"
    har_files(folder, windows=2)
    (folder / "train" / "Inertial Signals" / "total_acc_z_train.txt").unlink()
    with pytest.raises(DataError, match=r"total_acc_z_train\.txt does not exist"):
        HarSource().prepare(Order(place=str(tmp_path)))
    archive = har_zip(folder, tmp_path / "mine.zip", wrapped=False)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    with pytest.raises(
        DataError, match=r"UCI HAR Dataset.zip lacks train/Inertial Signals/total_acc_z_train.txt; give"
    ):
        HarSource().prepare(Order(place=str(archive), sha256=digest))
