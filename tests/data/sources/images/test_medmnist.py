"""MedMNIST from files of the official layout: parts, kinds of labels, checksums, what is wrong in a file."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.opening import open_dataset
from rayfl.data.sources.images.medmnist import MedMnistSource
from rayfl.data.sources.images.medmnist_sets import SETS
from rayfl.data.sources.preparation.inventory import inventory, verify
from rayfl.data.sources.preparation.preparing import Order
from rayfl.errors import ConfigError, DataError
from rayfl.experiment.parts import Parts
from rayfl.randomness import RandomStreams
from tests.support.medmnist_files import BREAST, RETINA, Arrays, medmnist_arrays, write_medmnist
from tests.support.server import Server


def breast(folder: Path, changes: dict[str, Any] | None = None) -> tuple[Path, str, Arrays]:
    """A file of BreastMNIST's layout, its SHA-256 and what is in it; None leaves an array out."""
    arrays = medmnist_arrays(BREAST, 2) | (changes or {})
    arrays = {name: array for name, array in arrays.items() if array is not None}
    return folder / "breastmnist.npz", write_medmnist(folder / "breastmnist.npz", arrays), arrays


def test_official_parts_are_read_as_they_are(tmp_path: Path, root: Path) -> None:
    file, digest, arrays = breast(tmp_path)
    source = MedMnistSource(subset="breastmnist")
    with pytest.raises(DataError, match=r"breastmnist-28.arrow does not exist; make it with `rayfl data prepare med"):
        source.open()
    with pytest.raises(DataError, match=r"has the md5 \w{32}, not 750601b1f35ba3300ea97c75c52ff8f6"):
        source.prepare(Order(place=str(file), offline=True))
    assert source.prepare(Order(place=str(file), sha256=digest)) == root / "prepared" / "breastmnist-28.arrow"
    assert verify(source.prepared_path) == ([], [])
    train, test = source.open(), source.official_test(RandomStreams(0))
    for samples, part in ((train, "train"), (test, "test")):
        np.testing.assert_array_equal(samples.x[:, 0], arrays[f"{part}_images"])
        assert samples.y.dtype == np.int64 and samples.y.tolist() == arrays[f"{part}_labels"][:, 0].tolist()
    assert train.spec == source.known_spec and train.spec.shape == (1, 28, 28) and train.spec.num_classes == 2
    assert source.class_names() == ("malignant", "normal, benign")
    assert len(MedMnistSource(subset="breastmnist", part="both").open().y) == 546 + 156
    assert [entry.content for entry in inventory(root)] == ["546 train + 156 test, 1 x 28 x 28, 2 classes"]


def test_validation_images_may_be_training_images(tmp_path: Path, root: Path) -> None:
    file, digest, arrays = breast(tmp_path)
    source = MedMnistSource(subset="breastmnist", validation="train")
    source.prepare(Order(place=str(file.parent), sha256=digest, offline=True))
    samples = source.open()
    wanted = np.concatenate([arrays["train_labels"], arrays["val_labels"]])[:, 0]
    assert samples.y.tolist() == wanted.tolist()
    np.testing.assert_array_equal(samples.x[546:, 0], arrays["val_images"])
    assert len(source.official_test(RandomStreams(0)).y) == 156
    assert source.prepared_path.name == "breastmnist-28-validation.arrow"


def test_colours_come_first_and_grades_are_classes(tmp_path: Path, root: Path, server: Server) -> None:
    arrays = medmnist_arrays(RETINA, 5, (3,))
    digest = write_medmnist(tmp_path / "retina.npz", arrays)
    server.files["/retinamnist.npz"] = (tmp_path / "retina.npz").read_bytes()
    source = MedMnistSource(subset="retinamnist")
    source.prepare(Order(place=server.url("/retinamnist.npz"), sha256=digest))
    samples = source.open()
    np.testing.assert_array_equal(samples.x, arrays["train_images"].transpose(0, 3, 1, 2))
    assert samples.spec.shape == (3, 28, 28) and samples.spec.num_classes == 5 and samples.spec.target == "class"
    assert (root / "medmnist" / "retinamnist.npz").exists()


def test_findings_of_an_x_ray_are_several_labels(tmp_path: Path, root: Path) -> None:
    arrays: Arrays = {}
    for part, count in SETS["chestmnist"].rows.items():
        arrays[f"{part}_images"] = np.zeros((count, 28, 28), np.uint8)
        arrays[f"{part}_labels"] = (np.arange(count)[:, np.newaxis] % 15 == np.arange(14)).astype(np.uint8)
    digest = write_medmnist(tmp_path / "chestmnist.npz", arrays)
    dataset = ["dataset={name: medmnist, subset: chestmnist}", "partition={name: iid, num_clients: 300}"]
    changes = [*dataset, "algorithm=fedavg", "model=two_nn"]
    config = load_config(Experiment, "quickstart", [*changes, "task=multilabel"])
    config.dataset.prepare(Order(place=str(tmp_path / "chestmnist.npz"), sha256=digest))
    data = open_dataset(config, RandomStreams(0))
    assert data.spec.target == "labels" and data.spec.num_classes == 14 and data.num_clients == 300
    labels = data.load(0)["train"].y.numpy()
    assert labels.shape[1] == 14 and labels.dtype == np.float32 and set(np.unique(labels.sum(1))) <= {0, 1}
    with pytest.raises(ConfigError, match="'medmnist' has several labels of each sample: set task=multilabel"):
        Parts(load_config(Experiment, "quickstart", changes)).task  # noqa: B018


IMAGES = np.zeros((546, 28, 28), np.uint8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"test_labels": None}, r"breastmnist.npz lacks test_labels, it has train_images, train_labels, val_images"),
        ({"train_images": IMAGES[:545]}, r"train_images has the shape \(545, 28, 28\), but that of breastmnist.npz is"),
        ({"train_images": IMAGES[..., None]}, r"train_images has the shape \(546, 28, 28, 1\), but .* \(546, 28, 28\)"),
        ({"train_images": IMAGES.astype(np.float32)}, r"train_images holds float32 and train_labels uint8"),
        ({"train_labels": np.zeros(546, np.uint8)}, r"train_labels has the shape \(546,\), but .* is \(546, 1\)"),
        ({"test_labels": np.full((156, 1), 2)}, r"test_labels has values from 2 to 2, but labels .* are 0 to 1"),
        ({"test_labels": np.full((156, 1), {})}, r"breastmnist.npz is not a readable file of MedMNIST: Object arrays"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, root: Path, changes: dict[str, Any], words: str) -> None:
    file, digest, _ = breast(tmp_path, changes)
    source = MedMnistSource(subset="breastmnist")
    with pytest.raises(DataError, match=words) as caught:
        source.prepare(Order(place=str(file), sha256=digest))
    assert re.search("get the official one", str(caught.value)) and not source.prepared_path.exists()


def test_a_damaged_or_missing_file_is_named(tmp_path: Path, root: Path) -> None:
    file, _, _ = breast(tmp_path)
    file.write_bytes(file.read_bytes()[:-50])
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(DataError, match=r"breastmnist.npz is not a readable file of MedMNIST"):
        MedMnistSource(subset="breastmnist").prepare(Order(place=str(file), sha256=digest))
    with pytest.raises(DataError, match=r"pathmnist_224.npz does not exist"):
        MedMnistSource(side=224).prepare(Order(place=str(tmp_path)))
    with pytest.raises(
        DataError, match=r"nothing is downloaded offline; get https://zenodo.org/records/10519652/files/"
    ):
        MedMnistSource().prepare(Order(offline=True))


def test_the_sets_are_those_of_the_paper() -> None:
    images = {name: sum(known.rows.values()) for name, known in SETS.items()}
    blank = (58_850 - images["organamnist"]) + (23_660 - images["organcmnist"]) + (25_221 - images["organsmnist"])
    assert sum(images.values()) + blank == 708_069, "the paper's number; version 2.2.4 removed blank images of organs"
    assert 0 < blank < 150
    digests = [digest for known in SETS.values() for digest in known.md5.values()]
    assert len(set(digests)) == 48 and all(re.fullmatch("[0-9a-f]{32}", digest) for digest in digests)
    classes = [(name.removesuffix("mnist"), len(known.classes)) for name, known in SETS.items()]
    assert classes == [
        *(("path", 9), ("chest", 14), ("derma", 7), ("oct", 4), ("pneumonia", 2), ("retina", 5), ("breast", 2)),
        *(("blood", 8), ("tissue", 8), ("organa", 11), ("organc", 11), ("organs", 11)),
    ]
    assert [name for name, known in SETS.items() if known.channels == 3] == [
        *("pathmnist", "dermamnist", "retinamnist", "bloodmnist"),
    ]
