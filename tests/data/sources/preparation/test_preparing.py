"""EMNIST, CIFAR, MNIST and TinyImageNet from small files in their own formats."""

from __future__ import annotations

import gzip
import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets

from rayfl.data.files.records import read_record
from rayfl.data.sources.images.cifar import Cifar10Source, Cifar100Source
from rayfl.data.sources.images.emnist import EmnistSource
from rayfl.data.sources.images.tiny_imagenet import TinyImageNetSource
from rayfl.data.sources.images.vision import MnistSource
from rayfl.data.sources.preparation.inventory import verify
from rayfl.data.sources.preparation.pooled_file import PooledFile
from rayfl.data.sources.preparation.preparing import ImageSource, Order
from rayfl.errors import DataError
from tests.data.sources.images.test_vision import MNIST_ROOT, needs_mnist
from tests.support.image_files import (
    COLOURS,
    X,
    Y,
    cifar_archive,
    emnist_archive,
    idx,
    jpeg,
    packed,
    tiny_files,
    unpacked,
)
from tests.support.server import Server


@pytest.fixture
def mnist(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A mirror with the four files; the test part is the first half."""
    resources = []
    for prefix, size in (("train", 20), ("t10k", 10)):
        for name, array in (("images-idx3", X[:size]), ("labels-idx1", Y[:size])):
            packed = gzip.compress(idx(array))
            server.files[f"/mnist/{prefix}-{name}-ubyte.gz"] = packed
            resources.append((f"{prefix}-{name}-ubyte.gz", hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [server.url("/gone/"), server.url("/mnist/")])
    return server


def test_mnist_is_downloaded_from_the_mirror_that_answers(mnist: Server, tmp_path: Path) -> None:
    source = MnistSource(root=tmp_path)
    path = source.prepare(Order())
    assert path == tmp_path / "prepared" / "mnist.arrow"
    file = PooledFile(path)
    np.testing.assert_array_equal(file.samples("train").x[:, 0], X)
    np.testing.assert_array_equal(file.samples("test").y, Y[:10])
    assert sum(path.startswith("/mnist/") for path, _ in mnist.requests) == 4
    assert verify(path) == ([], [])
    record = read_record(path)
    assert record is not None and len(record.files) == 4
    assert record.files[0].sha256 == hashlib.sha256(idx(X)).hexdigest()
    mnist.requests.clear()
    assert source.prepare(Order()) == path
    assert source.prepare(Order(force=True, offline=True)) == path
    assert mnist.requests == []


def test_many_prepare_and_one_does_it(mnist: Server, tmp_path: Path) -> None:
    source = MnistSource(root=tmp_path)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(source.prepare(Order()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "prepared" / "mnist.arrow"] * 4
    assert sum(path.startswith("/mnist/") for path, _ in mnist.requests) == 4


def test_offline_and_missing_files_say_what_to_do(mnist: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing is downloaded offline"):
        MnistSource(root=tmp_path).prepare(Order(offline=True))
    with pytest.raises(DataError, match=r"rayfl data prepare tiny_imagenet --root .*--source"):
        TinyImageNetSource(root=tmp_path).open()
    with pytest.raises(DataError, match=r"rayfl data prepare emnist split=balanced"):
        EmnistSource(root=tmp_path, split="balanced").open()
    with pytest.raises(DataError, match="--sha256 is for a single file"):
        MnistSource(root=tmp_path).prepare(Order(sha256="0" * 64))


def test_mnist_from_a_folder_of_packed_files(mnist: Server, tmp_path: Path) -> None:
    for name, content in mnist.files.items():
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / name.rpartition("/")[2]).write_bytes(content)
    path = MnistSource(root=tmp_path / "root").prepare(Order(place=str(tmp_path / "mine"), offline=True))
    np.testing.assert_array_equal(PooledFile(path).samples("train").y, Y)
    assert mnist.requests == []


@pytest.mark.slow
@needs_mnist
def test_the_prepared_mnist_equals_the_original(tmp_path: Path) -> None:
    source = MnistSource(root=tmp_path)
    source.prepare(Order(place=str(MNIST_ROOT)))
    prepared, original = source.open(), MnistSource(root=MNIST_ROOT).open()
    np.testing.assert_array_equal(prepared.x, original.x)
    np.testing.assert_array_equal(prepared.y, original.y)
    assert not prepared.x.flags.owndata
    assert prepared.moments is not None
    # as printed in many tutorials
    assert (round(float(prepared.moments.mean[0]), 4), round(float(prepared.moments.std[0]), 4)) == (0.1307, 0.3081)
    test = source.model_copy(update={"part": "test"}).open()
    assert np.bincount(test.y).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    both = MnistSource(root=MNIST_ROOT, part="both").open()
    np.testing.assert_array_equal(both.y, np.concatenate([original.y, test.y]))


@pytest.mark.parametrize(("split", "offset", "classes"), [("byclass", 0, 62), ("letters", 1, 26), ("balanced", 0, 47)])
def test_emnist_is_upright_with_labels_from_0(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, offset: int, classes: int
) -> None:
    archive = emnist_archive(split, Y + offset)
    server.files["/gzip.zip"] = archive
    monkeypatch.setattr(torchvision.datasets.EMNIST, "url", server.url("/gzip.zip"))
    monkeypatch.setattr(torchvision.datasets.EMNIST, "md5", hashlib.md5(archive).hexdigest())
    source = EmnistSource(root=tmp_path, split=split)  # type: ignore[arg-type]
    path = source.prepare(Order())
    assert path.name == f"emnist-{split}.arrow"
    prepared = source.open()
    np.testing.assert_array_equal(prepared.x[:, 0], X.transpose(0, 2, 1))
    np.testing.assert_array_equal(prepared.y, Y)
    assert prepared.spec.num_classes == classes
    path.unlink()
    np.testing.assert_array_equal(source.open().x, X.transpose(0, 2, 1)[:, np.newaxis])  # from torchvision's folder


def test_emnist_from_an_archive_on_disk_is_checked(tmp_path: Path) -> None:
    archive = tmp_path / "mine.zip"
    archive.write_bytes(emnist_archive("digits", Y))
    source = EmnistSource(root=tmp_path / "root", split="digits")
    with pytest.raises(DataError, match=r"mine\.zip has the md5"):
        source.prepare(Order(place=str(archive)))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    for _ in range(2):
        source.prepare(Order(place=str(archive), sha256=digest))
    np.testing.assert_array_equal(source.open().y, Y)
    with pytest.raises(DataError, match=r"prepared already, from .*mine\.zip; add --force .* leave out --source"):
        source.prepare(Order(place=str(tmp_path)))
    with pytest.raises(DataError, match="with other checksums; add --force"):
        source.prepare(Order(sha256="0" * 64))


@pytest.mark.parametrize(
    ("source", "key", "train", "meta"),
    [
        (Cifar10Source, "labels", {"data_batch_1": slice(0, 5), "data_batch_2": slice(5, 9)}, "batches.meta"),
        (Cifar100Source, "fine_labels", {"train": slice(0, 9)}, "meta"),
    ],
)
def test_cifar(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: type[Cifar10Source] | type[Cifar100Source],
    key: str,
    train: dict[str, slice],
    meta: str,
) -> None:
    original = getattr(torchvision.datasets, source.class_name)
    test = {"test_batch" if key == "labels" else "test": slice(9, 12)}
    archive, sums = cifar_archive(original.base_folder, key, {**train, **test})
    server.files["/cifar.tar.gz"] = archive
    monkeypatch.setattr(original, "train_list", [[name, sums[name]] for name in train])
    monkeypatch.setattr(original, "test_list", [[name, sums[name]] for name in test])
    monkeypatch.setattr(original, "meta", {**original.meta, "md5": sums[meta]})
    monkeypatch.setattr(original, "url", server.url("/cifar.tar.gz"))
    with pytest.raises(DataError, match="has the sha256"):
        source(root=tmp_path).prepare(Order())
    monkeypatch.setattr(source, "archive_sha256", hashlib.sha256(archive).hexdigest())
    source(root=tmp_path).prepare(Order())
    prepared = source(root=tmp_path, part="both").open()
    np.testing.assert_array_equal(prepared.x, COLOURS.reshape(12, 3, 32, 32))
    assert prepared.y.tolist() == [*range(10), 0, 1]
    assert not list(tmp_path.glob(".unpacking*"))
    other = source(root=tmp_path / "other")
    other.prepare(Order(place=str(tmp_path), offline=True))
    np.testing.assert_array_equal(other.open().x, COLOURS[:9].reshape(9, 3, 32, 32))
    damaged = tmp_path / original.base_folder / next(iter(train))
    damaged.write_bytes(b"damaged")
    with pytest.raises(DataError, match="delete that folder first"):
        other.prepare(Order(place=str(tmp_path), force=True))
    np.testing.assert_array_equal(other.open().x, COLOURS[:9].reshape(9, 3, 32, 32))
    assert "has changed since" in verify(source(root=tmp_path).prepared_path)[0][0]


def check_tiny(source: ImageSource) -> None:
    train, test = source.open(), source.model_copy(update={"part": "test"}).open()
    assert train.x.shape == (200, 3, 64, 64) and train.y.tolist() == list(range(200))
    np.testing.assert_allclose(train.x.mean((1, 2, 3)), np.arange(200), atol=1.5)
    assert test.y.tolist() == [3, 5]
    np.testing.assert_allclose(test.x.mean((1, 2, 3)), [3, 5], atol=1.5)


def test_tiny_imagenet_from_a_downloaded_zip(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = packed(tiny_files())
    server.files["/tiny.zip"] = archive
    source = TinyImageNetSource(root=tmp_path)
    told: list[str] = []
    digest = hashlib.sha256(archive).hexdigest()
    source.prepare(
        Order(place=server.url("/tiny.zip"), sha256=digest, progress=lambda what, done, total: told.append(what))
    )
    check_tiny(source)
    assert {"tiny-imagenet-200.zip", "decoding the train images", "decoding the test images"} <= set(told)
    assert verify(source.prepared_path) == ([], [])


@pytest.mark.parametrize("annotated", [True, False])
def test_tiny_imagenet_from_a_folder(tmp_path: Path, annotated: bool) -> None:
    folder = unpacked(tmp_path / "tiny", tiny_files(annotated))
    source = TinyImageNetSource(root=tmp_path / "root")
    source.prepare(Order(place=str(folder), offline=True))
    check_tiny(source)
    unpacked(tmp_path / "own" / "tiny-imagenet-200", tiny_files(annotated))
    own = TinyImageNetSource(root=tmp_path / "own")
    own.prepare(Order(offline=True))
    check_tiny(own)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train/n00000000/images/n00000000_0.JPEG": None}, "199 folders train/<class>/images, not 200"),
        ({"train/n00000001/images/n00000001_0.JPEG": b"?"}, r"n00000001_0\.JPEG: the image cannot be decoded"),
        ({"train/n00000001/images/n00000001_0.JPEG": jpeg(1, size=32)}, r"n00000001_0\.JPEG: the image has 32 x 32"),
        ({"val/val_annotations.txt": b""}, r"val_annotations\.txt does not name the class of val/images/val_0\.JPEG"),
        ({"val/val_annotations.txt": b"val_0.JPEG\tn9\nval_1.JPEG\tn8\n"}, "the class 'n8' of a test image is none"),
        ({"val/images/val_0.JPEG": None, "val/images/val_1.JPEG": None}, "no test images"),
    ],
)
def test_tiny_imagenet_that_is_incomplete(tmp_path: Path, change: dict[str, bytes | None], message: str) -> None:
    files = {name: content for name, content in {**tiny_files(), **change}.items() if content is not None}
    source = TinyImageNetSource(root=tmp_path / "root")
    with pytest.raises(DataError, match=message):
        source.prepare(Order(place=str(unpacked(tmp_path / "tiny", files))))
    assert not list((tmp_path / "root").rglob("*.arrow"))
