"""Small files of further image data sets, as torchvision lays them out: three images a part, each of another grey."""

from __future__ import annotations

import bz2
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from rayfl.data.sources.images import torchvision_sets
from rayfl.data.sources.images.torchvision_sets import SETS, OfficialPart
from tests.support.field_files import png
from tests.support.image_files import idx, jpeg, unpacked

PARTS = ("train", "val", "test")
LABELS = (1, 0, 1)
"""Of the images of each part."""


def brightness(part: str, row: int) -> int:
    """How bright an image of a part is."""
    return 20 + 60 * PARTS.index(part) + 20 * row


def _images(part: str) -> list[tuple[int, bytes]]:
    return [(label, jpeg(brightness(part, row), size=40)) for row, label in enumerate(LABELS)]


def _in_class_folders(path: str, ending: str = "jpg", **called: str) -> dict[str, bytes]:
    """Files in folders of classes, whose names sort by class and then by row."""
    found = {}
    for part, folder in called.items():
        for row, (label, image) in enumerate(_images(part)):
            found[f"{path.format(folder)}/class{label}/{row}.{ending}"] = image
    return found


def _lines(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def country211(root: Path) -> None:
    unpacked(root, _in_class_folders("country211/{}", train="train", val="valid", test="test"))


def dtd(root: Path) -> None:
    files: dict[str, bytes] = {}
    for part in PARTS:
        names = [f"class{label}/{part}{row}.jpg" for row, label in enumerate(LABELS)]
        files |= {f"dtd/dtd/images/{name}": image for name, (_, image) in zip(names, _images(part), strict=True)}
        files[f"dtd/dtd/labels/{part}1.txt"] = _lines(names)
    unpacked(root, files)


def eurosat(root: Path) -> None:
    unpacked(root, _in_class_folders("eurosat/{}", train="2750"))


def fgvc_aircraft(root: Path) -> None:
    folder = "fgvc-aircraft-2013b/data"
    files = {f"{folder}/variants.txt": _lines(["707-320", "A 300"])}
    for part in PARTS:
        lines = []
        for row, (label, image) in enumerate(_images(part)):
            files[f"{folder}/images/{part}{row}.jpg"] = image
            lines.append(f"{part}{row} {('707-320', 'A 300')[label]}")
        files[f"{folder}/images_variant_{part}.txt"] = _lines(lines)
    unpacked(root, files)


def flowers102(root: Path) -> None:
    files, labels = {}, []
    for part in PARTS:
        for label, image in _images(part):
            labels.append(label + 1)
            files[f"flowers-102/jpg/image_{len(labels):05d}.jpg"] = image
    folder = unpacked(root, files) / "flowers-102"
    savemat(folder / "imagelabels.mat", {"labels": np.array([labels])})
    savemat(folder / "setid.mat", {"trnid": [[1, 2, 3]], "valid": [[4, 5, 6]], "tstid": [[7, 8, 9]]})


def food101(root: Path) -> None:
    files: dict[str, bytes] = {}
    for part in ("train", "test"):
        listed: dict[str, list[str]] = {"pie": [], "soup": []}
        for row, (label, image) in enumerate(_images(part)):
            name = f"{('pie', 'soup')[label]}/{part}{row}"
            files[f"food-101/images/{name}.jpg"] = image
            listed[name.split("/")[0]].append(name)
        files[f"food-101/meta/{part}.json"] = json.dumps(listed).encode()
    unpacked(root, files)


def gtsrb(root: Path) -> None:
    files = _in_class_folders("gtsrb/GTSRB/{}", "ppm", train="Training")
    lines = ["Filename;Width;ClassId"]
    for row, (label, image) in enumerate(_images("test")):
        files[f"gtsrb/GTSRB/Final_Test/Images/{row:05d}.ppm"] = image
        lines.append(f"{row:05d}.ppm;40;{label}")
    files["gtsrb/GT-final_test.csv"] = _lines(lines)
    unpacked(root, files)


def imagenette(root: Path) -> None:
    files = {}
    for part, folder in (("train", "train"), ("test", "val")):
        for row, (label, image) in enumerate(_images(part)):
            files[f"imagenette2-320/{folder}/{('n01440764', 'n02102040')[label]}/{row}.jpeg"] = image
    unpacked(root, files)


def kmnist(root: Path) -> None:
    files = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        grey = np.array([np.full((28, 28), brightness(part, row)) for row in range(len(LABELS))], np.uint8)
        files[f"KMNIST/raw/{prefix}-images-idx3-ubyte"] = idx(grey)
        files[f"KMNIST/raw/{prefix}-labels-idx1-ubyte"] = idx(np.array(LABELS, np.uint8))
    unpacked(root, files)


def oxford_iiit_pet(root: Path) -> None:
    files = {}
    for part, called in (("train", "trainval"), ("test", "test")):
        lines = []
        for row, (label, image) in enumerate(_images(part)):
            files[f"oxford-iiit-pet/images/{part}_{row}.jpg"] = image
            lines.append(f"{part}_{row} {label + 1} 1 1")
        files[f"oxford-iiit-pet/annotations/{called}.txt"] = _lines(lines)
    unpacked(root, files)


def rendered_sst2(root: Path) -> None:
    found = {
        f"rendered-sst2/{folder}/{('negative', 'positive')[label]}/{row}.png": png(brightness(part, row), 448, 448)
        for part, folder in (("train", "train"), ("val", "valid"), ("test", "test"))
        for row, label in enumerate(LABELS)
    }
    unpacked(root, found)


def stanford_cars(root: Path) -> None:
    files = {}
    for part in ("train", "test"):
        for row, (_, image) in enumerate(_images(part)):
            files[f"stanford_cars/cars_{part}/{row}.jpg"] = image
    folder = unpacked(root, files) / "stanford_cars"
    (folder / "devkit").mkdir()
    rows = [(f"{row}.jpg", label + 1) for row, label in enumerate(LABELS)]
    annotations = np.array(rows, dtype=[("fname", "O"), ("class", "O")])
    savemat(folder / "devkit" / "cars_train_annos.mat", {"annotations": annotations})
    savemat(folder / "cars_test_annos_withlabels.mat", {"annotations": annotations})
    savemat(folder / "devkit" / "cars_meta.mat", {"class_names": np.array(["one", "two"], dtype=object)})


def stl10(root: Path) -> None:
    files = {"stl10_binary/unlabeled_X.bin": b""}
    for part in ("train", "test"):
        pixels = [np.full((3, 96, 96), brightness(part, row), np.uint8).tobytes() for row in range(len(LABELS))]
        files[f"stl10_binary/{part}_X.bin"] = b"".join(pixels)
        files[f"stl10_binary/{part}_y.bin"] = bytes(label + 1 for label in LABELS)
    unpacked(root, files)


def usps(root: Path) -> None:
    files = {}
    for part, name in (("train", "usps.bz2"), ("test", "usps.t.bz2")):
        lines = []
        for row, label in enumerate(LABELS):
            value = 2 * brightness(part, row) / 255 - 1
            lines.append(f"{label + 1} " + " ".join(f"{place}:{value:.9f}" for place in range(1, 257)))
        files[name] = bz2.compress(_lines(lines))
    unpacked(root, files)


LAYOUTS: Mapping[str, Callable[[Path], None]] = {
    made.__name__: made
    for made in (
        *(country211, dtd, eurosat, fgvc_aircraft, flowers102, food101, gtsrb, imagenette, kmnist, oxford_iiit_pet),
        *(rendered_sst2, stanford_cars, stl10, usps),
    )
}


def as_small_as_these(patch: pytest.MonkeyPatch) -> None:
    """Has rayfl expect as many images as these files have, and torchvision not compare their checksums."""
    small = {
        name: known._replace(
            parts={part: OfficialPart(len(LABELS), official.arguments) for part, official in known.parts.items()}
        )
        for name, known in SETS.items()
    }
    patch.setattr("rayfl.data.sources.images.torchvision_source.SETS", small)
    assert torchvision_sets.SETS is SETS
    for module in ("flowers102", "stl10"):
        patch.setattr(f"torchvision.datasets.{module}.check_integrity", lambda path, md5=None: Path(path).is_file())
