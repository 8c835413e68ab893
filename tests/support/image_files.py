"""Small files in the official layouts of MNIST, EMNIST, CIFAR and TinyImageNet."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

RANDOM = np.random.default_rng(0)
X = RANDOM.integers(0, 256, (20, 28, 28), dtype=np.uint8)
Y = (np.arange(20) % 10).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in the format of MNIST's files."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.tobytes()


def emnist_archive(split: str, labels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for part, size in (("train", 20), ("test", 10)):
            archive.writestr(f"gzip/emnist-{split}-{part}-images-idx3-ubyte.gz", gzip.compress(idx(X[:size])))
            archive.writestr(f"gzip/emnist-{split}-{part}-labels-idx1-ubyte.gz", gzip.compress(idx(labels[:size])))
        archive.writestr("gzip/emnist-other.gz", b"not looked at")
    return buffer.getvalue()


COLOURS = RANDOM.integers(0, 256, (12, 3072), dtype=np.uint8)


def cifar_archive(folder: str, key: str, files: dict[str, slice]) -> tuple[bytes, dict[str, str]]:
    """A small archive, and the md5 of its files."""
    buffer, sums = io.BytesIO(), {}
    labels = [label % 10 for label in range(12)]
    contents = {name: pickle.dumps({"data": COLOURS[rows], key: labels[rows]}) for name, rows in files.items()}
    names = {"label_names": list("abc"), "fine_label_names": list("abc")}
    contents["batches.meta" if key == "labels" else "meta"] = pickle.dumps(names)
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in contents.items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
            sums[name] = hashlib.md5(content).hexdigest()
    return buffer.getvalue(), sums


def jpeg(value: int, mode: str = "RGB", size: int = 64) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, (size, size), value if mode == "L" else (value, value, value)).save(buffer, "JPEG")
    return buffer.getvalue()


def tiny_files(annotated: bool = True) -> dict[str, bytes]:
    """200 classes of one training image, whose brightness is the class; validation images of classes 5 and 3."""
    wordnet = [f"n{position:08d}" for position in range(200)]
    files = {
        f"train/{label}/images/{label}_0.JPEG": jpeg(position, "L" if position == 7 else "RGB")
        for position, label in enumerate(wordnet)
    }
    if annotated:
        files["val/images/val_0.JPEG"], files["val/images/val_1.JPEG"] = jpeg(5), jpeg(3)
        files["val/val_annotations.txt"] = (
            f"val_0.JPEG\t{wordnet[5]}\t0\t0\t9\t9\nval_1.JPEG\t{wordnet[3]}\t0\t0\t9\t9\n".encode()
        )
    else:
        files[f"val/{wordnet[5]}/images/val_0.JPEG"] = jpeg(5)
        files[f"val/{wordnet[3]}/images/val_1.JPEG"] = jpeg(3)
    files["test/images/test_0.JPEG"] = jpeg(0)
    return files


def packed(files: dict[str, bytes], folder: str = "tiny-imagenet-200/") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(folder + name, content)
    return buffer.getvalue()


def unpacked(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
