"""Masks in files: prepared, in columns of lists and of images, and what is refused of them by name."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from rayfl.cli.entry import app
from rayfl.data.files.natural_file import NaturalHeader, write_natural
from rayfl.data.files.targets import to_column
from rayfl.data.sources.preparation.pooled_file import PooledFile
from rayfl.data.sources.preparation.pooled_writing import write_pooled
from rayfl.errors import DataError
from rayfl.examples import Examples, InputSpec
from rayfl.metrics.language import IGNORED
from tests.support.masks import CLIENTS, made, parts, solid


def binary(seed: int) -> Any:
    x, y, _, clients = made("flat", lambda y: np.where(y == 2, IGNORED, 255 * y.astype(np.int16)))
    return x, y, 2, clients


def test_masks_keep_their_values_in_files(tmp_path: Path) -> None:
    x, y, _, _ = solid(0)
    spec = InputSpec("image", x.shape[1:], 3, target="mask")
    write_pooled(tmp_path / "masks.arrow", "own", {"train": (x, y)}, 3, "made", spec)
    again = PooledFile(tmp_path / "masks.arrow").samples("train")
    assert np.array_equal(again.x, x) and np.array_equal(again.y, y) and again.spec == spec
    header = NaturalHeader(
        kind="own", input="image", shape=spec.shape, num_classes=3, vocabulary=0, storage="float32", target="mask"
    )
    schema = header.arrow_schema()
    flat = pa.array(np.ascontiguousarray(x).reshape(-1))
    columns = [
        pa.array(CLIENTS.tolist()),
        pa.array(["train"] * 30),
        pa.FixedSizeListArray.from_arrays(flat, type=schema.field("x").type),
        to_column(y, schema.field("y").type),
    ]
    write_natural(tmp_path / "masks.parquet", schema, [pa.Table.from_arrays(columns, schema=schema)])
    dataset = parts(dataset={"name": "leaf", "path": str(tmp_path / "masks.parquet")}, holdout={}).dataset
    loaded: Examples = dataset.load(1)["train"]
    rows = [int(np.flatnonzero((x == one).all((1, 2, 3, 4)))[0]) for one in loaded.x.numpy()]
    assert np.array_equal(loaded.y, y[rows]) and loaded.y.dtype == torch.int64 and set(CLIENTS[rows]) == {"south"}


def png(pixels: np.ndarray, mode: str = "L", kind: str = "PNG") -> bytes:
    return saved(Image.fromarray(pixels).convert(mode), kind)


def saved(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def with_palette(pixels: np.ndarray) -> Image.Image:
    """An image of classes in colours that have nothing to do with them, as Pascal VOC's masks."""
    image = Image.fromarray(pixels, "P")
    image.putpalette(np.random.default_rng(2).integers(0, 256, 768).astype(np.uint8).tobytes())
    return image


def table_of(kind: str, folder: Path) -> tuple[dict[str, Any], np.ndarray]:
    """A Parquet file with masks, the section that reads it, and the masks."""
    sides = (4, 5, 6) if kind == "volumes" else (7, 8)
    generator = np.random.default_rng(1)
    y = generator.integers(0, 3, (30, *sides)).astype(np.uint8)
    x = generator.integers(0, 256, (30, *sides)).astype(np.uint8)
    options: dict[str, Any] = {"name": "parquet", "path": str(folder / f"{kind}.parquet"), "target": "mask"}
    if kind == "images":
        columns = {"image": [png(one) for one in x], "mask": [png(one) for one in y]}
    else:
        options["shape"] = [1, *sides]
        columns = {"x": [one.ravel().tolist() for one in x.astype(float)], "y": [one.ravel().tolist() for one in y]}
    split = np.where(np.arange(30) % 3 == 0, "test", "train")
    pq.write_table(pa.table({**columns, "client": CLIENTS, "split": split}), options["path"])
    return options, y


@pytest.mark.parametrize("kind", ["images", "lists", "volumes"])
def test_masks_in_columns_of_files_are_lists_or_grey_images(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    options, y = table_of(kind, tmp_path)
    opened = parts(dataset=options, holdout={})
    assert opened.dataset.spec.num_classes == 3 and opened.dataset.names == ("north", "south", "west")
    opened.check()
    train = np.arange(10, 20)[np.arange(10, 20) % 3 != 0]
    loaded = opened.dataset.load(1)
    assert np.array_equal(loaded["train"].y, y[train]) and loaded["train"].y.dtype == torch.int64
    assert np.array_equal(loaded["test"].y, y[12:20:3])


def few_bits(mask: np.ndarray, bits: int) -> bytes:
    """A PNG file of 2 or 4 grey bits, which Pillow reads and does not write."""
    rows, columns = mask.shape
    places = (mask[..., None] >> np.arange(bits - 1, -1, -1) & 1).reshape(rows, columns * bits).astype(np.uint8)
    lines = b"".join(b"\0" + np.packbits(line).tobytes() for line in places)
    header = struct.pack(">IIBBBBB", columns, rows, bits, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    written = [struct.pack(">I", len(body)) + name + body for name, body in chunks]
    checked = [part + struct.pack(">I", zlib.crc32(part[4:])) for part in written]
    return b"\x89PNG\r\n\x1a\n" + b"".join(checked)


@pytest.mark.parametrize("kind", ["palette", "1 bit", "2 bits", "4 bits", "16 bits"])
def test_pixels_of_images_are_classes_whatever_their_colours(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    y = np.random.default_rng(1).integers(0, 2 if kind == "1 bit" else 4, (6, 7, 8))
    if kind == "16 bits":
        y[y == 3] = 300
    made: dict[str, Callable[[np.ndarray], bytes]] = {
        "palette": lambda one: saved(with_palette(one.astype(np.uint8))),
        "1 bit": lambda one: saved(Image.fromarray(one.astype(bool))),
        "2 bits": lambda one: few_bits(one, 2),
        "4 bits": lambda one: few_bits(one, 4),
        "16 bits": lambda one: saved(Image.fromarray(one.astype(np.uint16))),
    }
    columns = {"image": [png(one.astype(np.uint8)) for one in y], "mask": [made[kind](one) for one in y]}
    pq.write_table(
        pa.table({**columns, "client": ["a"] * 6, "split": ["train"] * 5 + ["test"]}), tmp_path / "own.parquet"
    )
    dataset = parts(dataset={"name": "parquet", "path": str(tmp_path / "own.parquet")}, holdout={}).dataset
    assert dataset.spec.num_classes == y.max() + 1
    assert np.array_equal(dataset.load(0)["train"].y, y[:5])


@pytest.mark.parametrize("kind", ["palette", "lists", "bytes"])
def test_pixels_of_a_value_that_is_ignored_do_not_count(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    y = np.random.default_rng(1).integers(0, 4, (6, 7, 8))
    y[y == 3] = 255
    masks = {
        "palette": [saved(with_palette(one.astype(np.uint8))) for one in y],
        "lists": [one.ravel().tolist() for one in y],
        "bytes": pa.array([one.ravel().tolist() for one in y], pa.list_(pa.uint8())),
    }[kind]
    columns = {"image": [png(one.astype(np.uint8)) for one in y], "mask": masks, "split": ["train"] * 5 + ["test"]}
    pq.write_table(pa.table({**columns, "client": ["a"] * 6}), tmp_path / "own.parquet")
    section = {"name": "parquet", "path": str(tmp_path / "own.parquet")}
    void = parts(dataset=section, holdout={}).dataset
    assert any("set dataset.ignore=255" in remark for remark in void.remarks())
    dataset = parts(dataset={**section, "ignore": 255}, holdout={}).dataset
    assert dataset.spec.num_classes == 3 and not any("labels" in remark for remark in dataset.remarks())
    assert np.array_equal(dataset.load(0)["train"].y, np.where(y == 255, IGNORED, y)[:5])
    with pytest.raises(DataError, match=r"dataset.ignore is for masks, and there are none"):
        _ = parts(task="classification", dataset={**section, "ignore": 255}, model="two_nn").dataset


def test_masks_of_0_and_255_are_two_classes_if_renumbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    _, y, _, _ = binary(0)
    expected = np.where(y == 255, 1, y)
    own = parts(dataset={"name": f"{__name__}:binary", "labels": "renumbered"}).dataset
    assert own.spec.num_classes == 2 and own.spec.target == "mask"
    assert np.array_equal(own.load(1)["train"].y, expected[own.places(1)["train"]])
    masks = np.where(y == 255, 255, 0).astype(np.uint8)
    columns = {"image": [png(one) for one in masks], "mask": [png(one) for one in masks], "client": CLIENTS}
    pq.write_table(pa.table(columns), tmp_path / "own.parquet")
    section = {"name": "parquet", "path": str(tmp_path / "own.parquet")}
    found = parts(dataset={**section, "labels": "renumbered"}).dataset
    assert found.spec.num_classes == 2
    assert np.array_equal(found.load(1)["train"].y, masks[10:20][found.places(1)["train"]] // 255)
    asked = parts(dataset=section).dataset
    assert asked.spec.num_classes == 256
    assert any("the labels are 0, 255, which makes 256 classes" in remark for remark in asked.remarks())


def test_prepared_masks_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    for kind in ("images", "volumes"):
        options, _ = table_of(kind, tmp_path)
        _ = parts(dataset=options, holdout={}).dataset
    said = CliRunner().invoke(app, ["data", "list"]).output
    assert "30 samples of 3 clients, 1 x 7 x 8, 3 classes of pixels" in said and "1 x 4 x 5 x 6" in said
    assert CliRunner().invoke(app, ["data", "verify"]).exit_code == 0


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({"mask": [[IGNORED] * 56]}, {}, r"own.parquet: column 'mask': no pixel of any mask counts"),
        (
            {"mask": [png(np.zeros((7, 8, 3), np.uint8), "RGB")]},
            {},
            r"column 'mask', row 0 \(client 'a'\): the image is in colour \(RGB\)",
        ),
        ({"mask": [png(np.zeros((7, 8), np.uint8), kind="JPEG")]}, {}, r"row 0 \(client 'a'\): JPEG does not keep the"),
        ({"mask": [[0] * 55 + [255]]}, {"num_classes": 21}, r"a label 255; .*, and dataset.ignore for pixels that do"),
        ({"mask": [[7] * 56]}, {"ignore": 7}, r"own.parquet: column 'mask': no pixel of any mask counts"),
        ({"mask": [png(np.zeros((8, 7), np.uint8))]}, {}, r"'mask' have 8 x 7 pixels, but images have 7 x 8"),
        ({"mask": [[0] * 50]}, {}, r"column 'mask' have 50 values, but images have 7 x 8: bring both to one size"),
        ({"mask": [[0.5] * 56]}, {}, r"has the type list<.*double>; masks are lists of integers"),
        ({"mask": [[0] * 55 + [-1]]}, {}, r"column 'mask', row 0 \(client 'a'\) has a pixel of class -1; classes are"),
        (
            {"mask": [[0] * 55 + [4]]},
            {"num_classes": 3},
            r"num_classes is 3, but there is a label 4; .*any with labels=renumbered",
        ),
        ({"outlines": [[0] * 56]}, {}, r"has no column y or mask or label, only image, outlines, client"),
        ({"mask": [[0] * 56], "n": [1]}, {"x": ["n"]}, r"masks belong to images"),
        ({"mask": [[0] * 56], "n": [1]}, {"y": ["mask", "n"]}, r"names 2 columns .*, but a mask is one"),
    ],
)
def test_masks_in_columns_that_are_none_are_named(
    columns: dict[str, Any], options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    path = tmp_path / "own.parquet"
    pq.write_table(pa.table({"image": [png(np.zeros((7, 8), np.uint8))], **columns, "client": ["a"]}), path)
    with pytest.raises(DataError, match=words):
        _ = parts(dataset={"name": "parquet", "path": str(path), **options}).dataset
