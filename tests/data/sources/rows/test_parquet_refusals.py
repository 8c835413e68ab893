"""What is wrong with a Parquet file of images or numbers is named."""

from __future__ import annotations

import io
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from rayfl.data.sources.base import NaturalPath
from rayfl.data.sources.rows.parquet import ParquetSource
from rayfl.errors import DataError
from tests.support.parquet_files import OTHER, PIXELS, PNG, write


@pytest.fixture(autouse=True)
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


GOOD: dict[str, Any] = {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1], "client": ["a", "b"], "split": ["train", "train"]}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"y": [0.5, 1.0]}, {}, "column 'y' has the type double; labels are integers from 0"),
        ({"y": [0, None]}, {}, r"column 'y', row 1 \(client 'b'\) is null"),
        ({"y": [0, -1]}, {}, r"column 'y', row 1 \(client 'b'\) is -1"),
        ({"y": [0, 5]}, {"num_classes": 5}, "dataset.num_classes is 5, but there is a label 5"),
        ({"y": [0, 40000]}, {}, "40001 classes; data with clients have 32768 at most"),
        ({"x": [[1.0, 2.0], [3.0]]}, {}, r"column 'x', row 1 \(client 'b'\) has 1 values, but row 0 has 2"),
        ({"x": pa.array([[], []], pa.list_(pa.float32()))}, {}, "column 'x' has lists without values"),
        (
            {"y": pa.array([[], []], pa.list_(pa.float32()))},
            {"target": "values"},
            "column 'y' has lists without values: what is to be learned must be there",
        ),
        ({"x": [[1.0, 2.0], None]}, {}, r"column 'x', row 1 \(client 'b'\) is null"),
        ({"x": [[1.0, 2.0], [3.0, None]]}, {}, r"column 'x', row 1 \(client 'b'\) has a null among"),
        ({"x": [[1.0, 2.0], [3.0, float("inf")]]}, {}, r"column 'x', row 1 \(client 'b'\) holds a value that"),
        ({"x": [[1.0, 2.0], [3.0, 4.0]]}, {"shape": (3,)}, r"dataset.shape is \[3\], 3 values, but .* have 2"),
        ({"x": ["a", "b"]}, {}, "the column 'x' has the type string; inputs are"),
        ({"x": [b"12", b"123"]}, {"shape": (2,)}, r"column 'x', row 1 \(client 'b'\) has 3 bytes, but row 0 has 2"),
        ({"x": [b"12", None]}, {"shape": (2,)}, r"column 'x', row 1 \(client 'b'\) is null"),
        ({"x": [b"12", b"34"]}, {}, r"column 'x' holds 2 raw bytes a row; say with dataset\.shape"),
        ({"x": [b"", PNG]}, {}, r"column 'x', row 0 \(client 'a'\) is empty \(0 bytes\): fill it or remove the row"),
        ({"x": [PNG, b"\x89PNG\r\n\x1a\n"]}, {}, r"column 'x', row 1 \(client 'b'\): the image cannot be decoded"),
        ({"x": [PNG, PNG[:-30]]}, {}, r"column 'x', row 1 \(client 'b'\): the image cannot be decoded"),
        (
            {"x": [PNG, OTHER.getvalue()]},
            {},
            r"column 'x', row 1 \(client 'b'\): the image has 2 x 2 .*row 0 \(client 'a'\) has 4 x 5",
        ),
        ({"x": [PNG, PNG]}, {"shape": (3, 4, 5)}, r"dataset.shape is \[3, 4, 5\], but the images have \[3, 5, 4\]"),
        ({"client": ["a", None]}, {}, "column 'client', row 1 is null"),
        ({"client": [7.0, float("nan")]}, {}, "column 'client', row 1 is null"),  # integers with a gap, as floats
        ({"client": ["a", ""]}, {}, "column 'client', row 1 is an empty name"),
        ({"client": [[1], [2]]}, {}, "column 'client' has the type list"),
        ({"split": ["train", "valid"]}, {}, "column 'split', row 1 is 'valid'; it must be train or test"),
        ({"split": ["test", "test"]}, {}, "all rows have the split test.*set dataset.part to test"),
        ({"split": ["train", "test"]}, {}, "no client has both train and test rows.*set dataset.part to train"),
        ({}, {"part": "test"}, "no row of .* has the split test"),
        ({"split": None}, {"part": "test"}, "dataset.part is test, but .* has no column of splits"),
        ({"y": None}, {}, "has no column y or label, only x, client, split"),
        ({"x": None}, {}, "has no column x or image, nor numeric columns"),
        ({}, {"y": "label"}, "dataset.y: .* has no column 'label', only x, y, client, split"),
        ({}, {"client": "writer"}, "dataset.client: .* has no column 'writer'"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, data_root: Path, change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    columns = {name: values for name, values in {**GOOD, **change}.items() if values is not None}
    with pytest.raises(DataError, match=message):
        ParquetSource(path=write(tmp_path / "f.parquet", columns), **options).open()
    assert not list(data_root.rglob("*.arrow*json")) and not list(data_root.rglob("*.arrow"))


def test_files_have_to_fit_each_other(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", GOOD)
    for change, message in (
        ({"x": [[1.0], [2.0]]}, r"b\.parquet: inputs of 1 values \(float32\), but .*a\.parquet has 2"),
        ({"z": [1, 2]}, None),
        ({"client": pa.nulls(2, pa.string())}, r"b\.parquet: column 'client' is null in all rows"),
        ({"x": ["a", "b"]}, "the column 'x' has the type string"),
    ):
        source = ParquetSource(paths=(first, write(tmp_path / "b.parquet", {**GOOD, **change})))
        if message is None:
            assert isinstance(source.open(), NaturalPath)
            continue
        with pytest.raises(DataError, match=message):
            source.open()
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"b\.parquet is not a readable Parquet file: "):
        ParquetSource(paths=(first, tmp_path / "b.parquet")).open()
    (tmp_path / "b.dat").write_bytes(b"packed")
    with pytest.raises(DataError, match=r"readable Parquet file, which it is read as because .* in none of \.csv, "):
        ParquetSource(path=tmp_path / "b.dat").open()
    empty = write(tmp_path / "e.parquet", {"x": pa.array([], pa.list_(pa.float32())), "y": pa.array([], pa.int64())})
    with pytest.raises(DataError, match=r"e\.parquet: no rows"):
        ParquetSource(path=empty).open()
    for text in ("x,y\n", "x,y\n,\n"):
        (tmp_path / "e.csv").write_text(text)
        with pytest.raises(DataError, match=r"e\.csv: no rows, or none with values"):
            ParquetSource(path=tmp_path / "e.csv").open()


@pytest.mark.parametrize("name", ["f.csv.gz", "f.JSONL.ZIP"])
def test_folders_and_compressed_files_are_told_from_damaged_and_absent_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"dataset.path: .* is a folder: name its files with dataset.paths"):
        ParquetSource(path=tmp_path).open()
    (tmp_path / name).write_bytes(b"\x1f\x8b")
    with pytest.raises(DataError, match=rf"dataset.path: .*{name} is compressed: unpack it"):
        ParquetSource(path=tmp_path / name).open()


def png_of(width: int, height: int) -> bytes:
    """A PNG that says it is that large, with its pixels missing: nobody gets so far as to unpack them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9_500, 14_000, 50_000])
def test_an_image_that_unpacks_to_more_than_a_memory_holds_is_named(tmp_path: Path, side: int) -> None:
    """Around Pillow's limit, twice that, and far above."""
    small = io.BytesIO()
    Image.fromarray(PIXELS[0, 0]).save(small, "PNG")
    path = write(tmp_path / "f.parquet", {"image": [small.getvalue(), png_of(side, side)], "label": [0, 1]})
    started = time.monotonic()
    with pytest.raises(
        DataError, match=r"f\.parquet: column 'image', row 1: the image unpacks to more than the [\d,]+"
    ):
        ParquetSource(path=path).open()
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(("kind", "mode"), [("uint16", "I;16"), ("int32", "I"), ("float32", "F")])
def test_images_of_more_than_8_bits_are_named(tmp_path: Path, kind: str, mode: str) -> None:
    deep = io.BytesIO()
    Image.fromarray(PIXELS[0, 0].astype(kind) * 100).save(deep, "TIFF")
    path = write(tmp_path / "f.parquet", {"image": [PNG, deep.getvalue()], "label": [0, 1]})
    with pytest.raises(DataError, match=rf"column 'image', row 1: the pixels have more than 8 bits .*mode {mode}\)"):
        ParquetSource(path=path).open()


def test_images_that_do_not_fit_together_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("rayfl.data.images.images.np.empty", full)
    path = write(tmp_path / "f.parquet", {"image": [png_of(9000, 9000)] * 50, "label": [0, 1] * 25})
    with pytest.raises(DataError, match=r"row 0: 50 images of 9000 x 9000 pixels do not fit into memory \(4 GiB\)"):
        ParquetSource(path=path).open()
