"""FEMNIST from NIST's folders or archives."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rayfl.data.sources.leaf import Sampling, import_femnist_raw
from rayfl.data.sources.leaf.pictures import femnist_pixels
from rayfl.data.sources.natural import NaturalDataset
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

CODES = {"3": "33", "A": "41", "z": "7a"}
LABELS = {"3": 3, "A": 10, "z": 61}
Writers = Mapping[str, str]
TWO: Writers = {"f0000_14": "3A3z", "f0001_41": "zzA"}


def picture(number: int, size: tuple[int, int] = (128, 128)) -> bytes:
    """A white image with a dark square, another one for each number; PNG."""
    image = Image.new("RGB", size, (255, 255, 255))
    image.paste((number % 200, 0, 0), (20 + number, 30, 60 + number, 70))
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def nist(root: Path, writers: Writers = TWO) -> Path:
    """NIST's folders for writers who wrote these characters, in this order; each image is another one."""
    number = 0
    for writer, written in writers.items():
        for character in written:
            code = CODES[character]
            by_class = root / "by_class" / code / "hsf_0" / f"hsf_0_{number:05d}.png"
            by_write = root / "by_write" / "hsf_0" / writer / f"d{writer[1:]}" / f"d_{number:05d}.png"
            for path in (by_class, by_write):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(picture(number))
            number += 1
    # What else NIST's folders have, and LEAF passes over.
    (root / "by_class" / "33" / "train_33").mkdir(parents=True)
    (root / "by_class" / "33" / "hsf_0.mit").write_text("list")
    (root / "by_class" / "33" / "train_33" / "train_33_00000.png").write_bytes(b"never read")
    return root


def zipped(root: Path) -> Path:
    """The same as archives beside each other, as NIST offers them."""
    for name in ("by_class", "by_write"):
        with zipfile.ZipFile(root / f"{name}.zip", "w") as archive:
            for path in sorted((root / name).rglob("*")):
                archive.write(path, path.relative_to(root).as_posix())
        shutil.rmtree(root / name)
    return root


@pytest.mark.parametrize("archived", [False, True])
def test_writers_and_labels(tmp_path: Path, archived: bool) -> None:
    source = nist(tmp_path / "n")
    if archived:
        zipped(source)
    report = import_femnist_raw(source, tmp_path / "f.parquet", Sampling(train_fraction=0.75))
    assert (report.clients, report.samples, report.warnings) == (2, {"train": 5, "test": 2}, ())
    dataset = NaturalDataset(report.destination, 0, RandomStreams(0))
    assert dataset.names == tuple(TWO)
    assert (dataset.spec.shape, dataset.spec.num_classes) == ((1, 28, 28), 62)
    number = 0
    for client, written in enumerate(TWO.values()):
        parts = dataset.load(client)
        rows = {
            tuple((x.flatten() * 255).round().int().tolist()): label
            for part in parts.values()
            for x, label in zip(part.x, part.y.tolist(), strict=True)
        }
        for character in written:
            assert rows[tuple(femnist_pixels(picture(number), "").tolist())] == LABELS[character]
            number += 1


def test_pixels_are_leafs() -> None:
    pixels = femnist_pixels(picture(5), "x").reshape(28, 28)
    grey = Image.open(io.BytesIO(picture(5))).convert("L")
    # LEAF's thumbnail of its days: Lanczos over all pixels, with no coarser step before.
    expected = grey.copy()
    expected.thumbnail((28, 28), Image.Resampling.LANCZOS, reducing_gap=None)
    np.testing.assert_array_equal(pixels, np.asarray(expected))
    assert pixels[0, 0] == 255
    assert pixels[10, 10] < 10


def test_leafs_mistake_of_doubled_images_can_be_had(tmp_path: Path) -> None:
    source = nist(tmp_path / "n", {"f0000_14": "3A", "f0001_41": "zA", "f0002_01": "3z3"})
    plain = import_femnist_raw(source, tmp_path / "f.parquet", Sampling(by="user", train_fraction=0.99))
    doubled = import_femnist_raw(source, tmp_path / "g.parquet", Sampling(by="user", train_fraction=0.99), True)
    assert sum(plain.samples.values()) == 7
    assert sum(doubled.samples.values()) == 9
    by_client: dict[str, list[int]] = {}
    table = pq.read_table(doubled.destination)
    for client, label in zip(table.column("client").to_pylist(), table.column("y").to_pylist(), strict=True):
        by_client.setdefault(client, []).append(label)
    assert by_client == {"f0000_14": [3, 10], "f0001_41": [61, 61, 10], "f0002_01": [3, 3, 61, 3]}


def test_an_image_of_two_classes_has_the_first(tmp_path: Path) -> None:
    source = nist(tmp_path / "n", {"f0000_14": "zzz"})
    twin = source / "by_class" / "41" / "hsf_0" / "hsf_0_00000.png"
    twin.parent.mkdir(parents=True)
    twin.write_bytes(picture(1))
    report = import_femnist_raw(source, tmp_path / "f.parquet")
    assert report.warnings == (f"{source}: 1 images are in several classes; the first counts",)
    assert sorted(pq.read_table(report.destination).column("y").to_pylist()) == [10, 61, 61]


def test_what_was_left_out_is_said(tmp_path: Path) -> None:
    source = nist(tmp_path / "n", {"f0000_14": "3A3z", "f0001_41": "z"})
    report = import_femnist_raw(source, tmp_path / "f.parquet", Sampling(min_samples=2))
    assert report.warnings == (f"{source}: 1 clients have fewer than 2 samples and are left out",)


def without_writers(root: Path) -> None:
    shutil.rmtree(root / "by_write")


def without_a_class(root: Path) -> None:
    shutil.rmtree(root / "by_class" / "33" / "hsf_0")


def with_a_star(root: Path) -> None:
    (root / "by_class" / "33").rename(root / "by_class" / "2a")


def with_half_an_image(root: Path) -> None:
    for path in root.rglob("*_00003.png"):
        path.write_bytes(picture(3)[:150])


def with_an_outside_member(root: Path) -> None:
    with zipfile.ZipFile(zipped(root) / "by_write.zip", "a") as archive:
        archive.writestr("by_write/../../f.png", b"")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_writers, r"n has neither by_write nor by_write\.zip; fetch"),
        (without_a_class, r"d_0000\d\.png has the content of no file in by_class"),
        (with_a_star, "2a is the code of no digit and no letter"),
        (with_half_an_image, r"d_00003\.png is not a readable PNG image"),
        (with_an_outside_member, r"by_write\.zip: the member 'by_write/\.\./\.\./f\.png' leads out of the archive"),
    ],
)
def test_incomplete_and_damaged_sources_are_refused(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    source = nist(tmp_path / "n")
    change(source)
    destination = tmp_path / "f.parquet"
    destination.write_text("as it was")
    with pytest.raises(DataError, match=message):
        import_femnist_raw(source, destination)
    assert destination.read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.parquet", "n"]


@pytest.mark.parametrize("name", ["by_class", "by_write"])
def test_folders_without_images_are_refused(tmp_path: Path, name: str) -> None:
    source = nist(tmp_path / "n")
    shutil.rmtree(source / name)
    (source / name).mkdir()
    with pytest.raises(DataError, match=rf"n/{name} has no file <"):
        import_femnist_raw(source, tmp_path / "f.parquet")


def test_an_image_of_another_size_is_refused(tmp_path: Path) -> None:
    source = nist(tmp_path / "n")
    for path in (source / "by_class/33/hsf_0/hsf_0_00000.png", source / "by_write/hsf_0/f0000_14/d0000_14/d_00000.png"):
        path.write_bytes(picture(0, (64, 128)))
    with pytest.raises(DataError, match=r"d_00000\.png has 64 x 128 pixels; NIST's have 128 x 128"):
        import_femnist_raw(source, tmp_path / "f.parquet")
