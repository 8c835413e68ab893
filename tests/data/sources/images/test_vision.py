"""MNIST through torchvision, and what is said when it cannot be read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from rayfl.data.sources.images.vision import MnistSource
from rayfl.errors import DataError

REPOSITORY = Path(__file__).resolve().parents[4]
MNIST_ROOT = Path(os.environ.get("RAYFL_TEST_DATA") or REPOSITORY.parent / "shared" / "data") / "mnist"
needs_mnist = pytest.mark.skipif(
    not (MNIST_ROOT / "MNIST" / "raw").is_dir(),
    reason=f"no MNIST in {MNIST_ROOT}; set RAYFL_TEST_DATA to the folder that has mnist/MNIST/raw",
)


def write_raw(root: Path, content: bytes) -> None:
    """The four files that torchvision asks for, all with the same content."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{name}-ubyte").write_bytes(content)


def break_torchvision(folder: Path, monkeypatch: pytest.MonkeyPatch, statement: str) -> None:
    """Put a torchvision that fails on import before the installed one, which is forgotten."""
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(statement)
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)


@needs_mnist
def test_the_training_images_are_read():
    samples = MnistSource(root=MNIST_ROOT).open()
    x, y, spec = samples.x, samples.y, samples.spec
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((60_000, 1, 28, 28), np.uint8, (60_000,), np.int64)
    assert np.bincount(y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert (spec.kind, spec.shape, spec.num_classes) == ("image", (1, 28, 28), 10)


def test_the_root_is_looked_up_here_and_then_in_the_data_root(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    assert MnistSource().resolved_root == tmp_path / "data"
    assert MnistSource(root="mnist").resolved_root == tmp_path / "data" / "mnist"
    (tmp_path / "mnist").mkdir()
    assert MnistSource(root="mnist").resolved_root.resolve() == (tmp_path / "mnist").resolve()
    assert MnistSource(root=tmp_path / "elsewhere").resolved_root == tmp_path / "elsewhere"


def test_a_missing_folder_is_named_with_the_way_to_fill_it(tmp_path):
    root = tmp_path / "nothing"
    with pytest.raises(DataError) as caught:
        MnistSource(root=root).open()
    assert str(root / "MNIST" / "raw") in str(caught.value)
    assert f"`rayfl data prepare mnist --root {root}`" in str(caught.value)
    assert "download=True" not in str(caught.value)
    (root / "MNIST" / "raw").mkdir(parents=True)
    with pytest.raises(DataError, match=r"Dataset not found.*delete that folder first") as caught:
        MnistSource(root=root).open()
    assert "download=True" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>not found</html>",
        bytes([0, 0, 8, 3, 0, 0, 0, 9, 0, 0, 0, 28, 0, 0, 0, 28, 1]),
        bytes([0, 0, 8, 1, 0, 0, 0, 2, 1, 2]),
    ],
    ids=["empty", "html", "truncated", "labels as images"],
)
def test_a_damaged_file_names_its_folder(tmp_path, content):
    write_raw(tmp_path, content)
    with pytest.raises(DataError, match="delete that folder first") as caught:
        MnistSource(root=tmp_path).open()
    assert str(tmp_path / "MNIST" / "raw") in str(caught.value)


def test_images_of_another_size_are_refused(tmp_path):
    write_raw(tmp_path, bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 2, 1, 2, 3, 4]))
    labels = tmp_path / "MNIST" / "raw" / "train-labels-idx1-ubyte"
    labels.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 7]))
    with pytest.raises(DataError, match=r"images of shape \(1, 2, 2\)"):
        MnistSource(root=tmp_path).open()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("RuntimeError", "operator torchvision::nms does not exist"),
        ("AttributeError", "partially initialized module 'torchvision' has no attribute 'extension'"),
    ],
)
def test_a_torchvision_of_another_torch_is_explained(tmp_path, monkeypatch, error, message):
    break_torchvision(tmp_path, monkeypatch, f"raise {error}({message!r})")
    with pytest.raises(DataError, match=f"{message}.*install matching versions"):
        MnistSource(root=tmp_path).open()


def test_an_absent_torchvision_is_explained(tmp_path, monkeypatch):
    break_torchvision(tmp_path, monkeypatch, "raise ImportError('libtorch.so: cannot open shared object file')")
    monkeypatch.setattr("rayfl.data.sources.images.vision.version", _no_distribution)
    with pytest.raises(DataError, match=r"libtorch\.so.*no torchvision is installed.*pip install --upgrade"):
        MnistSource(root=tmp_path).open()


def _no_distribution(name: str) -> str:
    from importlib.metadata import PackageNotFoundError

    raise PackageNotFoundError(name)
