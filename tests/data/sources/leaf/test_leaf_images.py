"""LEAF's CelebA, with its image files, and LEAF's Synthetic."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rayfl.data.sources.leaf import LeafOptions, import_leaf
from rayfl.data.sources.natural import NaturalDataset
from rayfl.errors import DataError
from rayfl.models.zoo import LeafCNN, TwoNN
from rayfl.randomness import RandomStreams
from tests.support.leaf_sources import document, write_source


def photograph(red: int, size: tuple[int, int] = (178, 218), kind: str = "PNG") -> bytes:
    """An image of one colour."""
    content = io.BytesIO()
    Image.new("RGB", size, (red, 100, 50)).save(content, kind)
    return content.getvalue()


def album(folder: Path, **images: bytes) -> Path:
    folder.mkdir()
    for name, content in images.items():
        (folder / f"{name}.jpg").write_bytes(content)
    return folder


def celebrity(*names: str, label: float = 1) -> dict[str, list[Any]]:
    return {"x": [f"{name}.jpg" for name in names], "y": [label] * len(names)}


def test_celeba_becomes_84_by_84_pixels(tmp_path: Path) -> None:
    images = album(tmp_path / "i", a=photograph(10), b=photograph(20, kind="JPEG"), c=photograph(30), d=photograph(40))
    # Python 3 made LEAF write its labels as 1.0 and 0.0.
    source = write_source(
        tmp_path / "l", document(eve=celebrity("c", "a", label=1.0), bob=celebrity("b")), document(eve=celebrity("d"))
    )
    report = import_leaf("celeba", source, tmp_path / "f.parquet", LeafOptions(images=images))
    assert (report.clients, report.samples) == (2, {"train": 3, "test": 1})
    dataset = NaturalDataset(report.destination, 0, RandomStreams(0))
    assert dataset.names == ("bob", "eve")
    assert dataset.spec.shape == (3, 84, 84)
    assert dataset.spec.num_classes == 2
    x = dataset.load(1)["train"].x
    for image, red in zip(x, (30, 10), strict=True):
        expected = np.broadcast_to(np.float32([red, 100, 50])[:, None, None] / 255, (3, 84, 84))
        np.testing.assert_allclose(image.numpy(), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(dataset.load(0)["train"].x[0, 0], 20 / 255, atol=2.5 / 255)


def test_celeba_reads_images_of_a_zip_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "i.zip", "w") as archive:
        archive.writestr("img_align_celeba/a.jpg", photograph(10))
    source = write_source(tmp_path / "l", document(eve=celebrity("a")), document(eve=celebrity("a")))
    report = import_leaf("celeba", source, tmp_path / "f.parquet", LeafOptions(images=tmp_path / "i.zip"))
    assert pq.read_table(report.destination).column("x").to_pylist()[0][0] == 10
    assert "1 samples also occur" in report.warnings[0]


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (celebrity("b"), r"a\.json, user 'eve': the image 'b\.jpg' of x\[0\] is not in .*/i; add it there"),
        ({"x": ["../l/secret"], "y": [0]}, r"user 'eve': the image '\.\./l/secret' of x\[0\] is not in"),
        ({"x": [3], "y": [0]}, r"user 'eve': x\[0\] is not the name of an image file"),
        (celebrity("a", label=0.5), r"user 'eve': y\[0\] is 0\.5, not an integer from 0 to 1"),
        (celebrity("a", label=float("nan")), r"user 'eve': y\[0\] is nan"),
        (celebrity("a", label=2), r"user 'eve': y\[0\] is 2"),
        (celebrity("bad"), r"i/bad\.jpg is not a readable JPEG or PNG image"),
        (celebrity("cut"), r"i/cut\.jpg is not a readable JPEG or PNG image"),
        (celebrity("bomb"), r"i/bomb\.jpg has 5000 x 4000 pixels"),
    ],
)
def test_unusable_images_are_refused(tmp_path: Path, user: dict[str, list[Any]], message: str) -> None:
    good = photograph(10)
    large = {"bomb": photograph(1, (5000, 4000))} if user == celebrity("bomb") else {}
    images = album(tmp_path / "i", a=good, bad=b"GIF89a", cut=good[:-30], **large)
    (source := write_source(tmp_path / "l", document(eve=user))).joinpath("secret").write_bytes(good)
    with pytest.raises(DataError, match=message):
        import_leaf("celeba", source, tmp_path / "f.parquet", LeafOptions(images=images))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["i", "l"]


def test_missing_and_ambiguous_image_folders_are_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path / "l", document(eve=celebrity("a")))
    with pytest.raises(DataError, match="nowhere does not exist; give a folder or a zip archive"):
        import_leaf("celeba", source, tmp_path / "f", LeafOptions(images=tmp_path / "nowhere"))
    album(album(tmp_path / "i", a=photograph(1)) / "deeper", a=photograph(2))
    with pytest.raises(DataError, match="two image files have the same name"):
        import_leaf("celeba", source, tmp_path / "f", LeafOptions(images=tmp_path / "i"))


def vectors(*rows: list[Any], label: Any = 0) -> dict[str, list[Any]]:
    return {"x": list(rows), "y": [label] * len(rows)}


def test_synthetic_keeps_vectors_as_float32(tmp_path: Path) -> None:
    # FedProx's generator writes labels as floats.
    source = write_source(
        tmp_path / "l",
        document(nobody=vectors(), ann=vectors([-3, 0.1], [1e9, 5]), bob=vectors([7.5, 2], label=4.0)),
        document(ann=vectors([1, 2], label=1)),
    )
    report = import_leaf("synthetic", source, tmp_path / "f.parquet")
    assert report.clients == 2
    dataset = NaturalDataset(report.destination, 0, RandomStreams(0))
    assert (dataset.spec.shape, dataset.spec.num_classes) == ((2,), 5)
    parts = dataset.load(0)
    np.testing.assert_array_equal(parts["train"].x.numpy(), np.float32([[-3, 0.1], [1e9, 5]]))
    assert parts["test"].y.tolist() == [1]
    network = TwoNN(hidden=(3,)).network(dataset.spec)
    assert network.logits(network.initialize(0), parts["train"].x).shape == (2, 5)
    with pytest.raises(Exception, match=r"leaf_cnn needs images.*choose another model or other data"):
        LeafCNN().network(dataset.spec)


@pytest.mark.parametrize(
    ("user", "message"),
    [
        (vectors([1, 2, 3]), r"x\[0\] has 3 numbers, but those of .*a\.json, user 'ann' have 2"),
        (vectors([1, "2"]), r"x\[0\] is not a list of 2 numbers"),
        (vectors([1, True]), r"x\[0\] is not a list of 2 numbers"),
        ({"x": [1], "y": [0]}, r"x\[0\] is not a list of 2 numbers"),
        (vectors([1, float("nan")]), r"number 1 of x\[0\] is not finite"),
        (vectors([1, 1e39]), r"number 1 of x\[0\] is not finite as float32"),
        (vectors([1, 10**400]), "a number is not finite as float32"),
        (vectors([1, 2], label=1.5), r"y\[0\] is 1\.5, not an integer from 0 to 999"),
        (vectors([1, 2], label=-1.0), r"y\[0\] is -1\.0"),
        (vectors([1, 2], label=float("inf")), r"y\[0\] is inf"),
    ],
)
def test_malformed_vectors_are_refused(tmp_path: Path, user: dict[str, list[Any]], message: str) -> None:
    source = write_source(tmp_path / "l", document(ann=vectors([1, 2]), bob=user))
    with pytest.raises(DataError, match=rf"a\.json, user 'bob': {message}"):
        import_leaf("synthetic", source, tmp_path / "f.parquet")


def test_a_first_vector_that_is_none_is_refused(tmp_path: Path) -> None:
    for number, first in enumerate(([], 3)):
        source = write_source(tmp_path / str(number), document(ann=vectors(first)))  # type: ignore[arg-type]
        with pytest.raises(DataError, match=r"user 'ann': x\[0\] is not a list of numbers"):
            import_leaf("synthetic", source, tmp_path / "f.parquet")
