"""Users' own Parquet files: every way to store inputs, and every way to get them wrong."""

from __future__ import annotations

import io
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.federated import FederatedDataset
from rayfl.data.sources.base import NaturalPath, Samples
from rayfl.data.sources.inventory import verify
from rayfl.data.sources.parquet import ParquetSource
from rayfl.errors import DataError
from rayfl.experiment.parts import Parts

SHARED = Path(os.environ.get("RAYFL_TEST_DATA") or Path(__file__).resolve().parents[4] / "shared" / "data")
needs_shared = pytest.mark.skipif(
    not (SHARED / "femnist_train.parquet").exists(),
    reason=f"no femnist_train.parquet in {SHARED}; set RAYFL_TEST_DATA to the folder that has it",
)
RANDOM = np.random.default_rng(0)
PIXELS = RANDOM.integers(0, 256, (12, 3, 5, 4), dtype=np.uint8)
LABELS = [0, 1, 2] * 4


@pytest.fixture(autouse=True)
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


def write(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def encoded(kind: str) -> list[bytes]:
    result = []
    for image in PIXELS:
        buffer = io.BytesIO()
        options = {"lossless": True} if kind == "WEBP" else {}
        Image.fromarray(image.transpose(1, 2, 0)).save(buffer, kind, **options)
        result.append(buffer.getvalue())
    return result


def pooled(path: Path, **options: Any) -> Samples:
    samples = ParquetSource(path=path, **options).open()
    assert isinstance(samples, Samples)
    return samples


def clients_of(source: dict[str, Any], **sections: Any) -> FederatedDataset:
    content = {
        "model": "two_nn",
        "algorithm": "fedavg",
        "partition": "natural",
        "dataset": {"name": "parquet", **source},
    }
    return Parts(load_config(Experiment, {**content, **sections}, [])).dataset


RAW = [image.tobytes() for image in PIXELS]
FLAT = PIXELS.reshape(12, 60)
STORED: dict[str, tuple[Any, dict[str, Any]]] = {
    "png": (encoded("PNG"), {}),
    "webp": (encoded("WEBP"), {}),
    "png of a known shape": (encoded("PNG"), {"shape": (3, 5, 4)}),
    "struct": ([{"bytes": data, "path": None} for data in encoded("PNG")], {}),
    "raw": (RAW, {"shape": (3, 5, 4)}),
    "raw of fixed size": (pa.array(RAW, pa.binary(60)), {"shape": (3, 5, 4)}),
    "lists": (pa.array(FLAT.tolist(), pa.list_(pa.uint8())), {"shape": (3, 5, 4)}),
    "large lists": (pa.array(FLAT.tolist(), pa.large_list(pa.uint8())), {"shape": (3, 5, 4)}),
    "fixed-size lists": (pa.array(FLAT.tolist(), pa.list_(pa.uint8(), 60)), {"shape": (3, 5, 4)}),
}


@pytest.mark.parametrize("kind", STORED)
def test_pixels_in_all_forms(tmp_path: Path, kind: str) -> None:
    column, options = STORED[kind]
    samples = pooled(write(tmp_path / "f.parquet", {"image": column, "label": LABELS}), **options)
    np.testing.assert_array_equal(samples.x, PIXELS)
    assert samples.x.dtype == np.uint8 and samples.y.tolist() == LABELS
    assert (samples.spec.shape, samples.spec.num_classes) == ((3, 5, 4), 3)


def test_grey_images_have_one_channel_unless_others_have_colour(tmp_path: Path) -> None:
    grey = io.BytesIO()
    Image.fromarray(PIXELS[0, 0]).save(grey, "PNG")
    samples = pooled(write(tmp_path / "f.parquet", {"image": [grey.getvalue()] * 2, "label": [0, 1]}))
    np.testing.assert_array_equal(samples.x[1, 0], PIXELS[0, 0])
    mixed = pooled(write(tmp_path / "g.parquet", {"image": [grey.getvalue(), encoded("PNG")[1]], "label": [0, 1]}))
    np.testing.assert_array_equal(mixed.x, np.stack([np.repeat(PIXELS[0, :1], 3, axis=0), PIXELS[1]]))


def test_numbers_are_taken_as_they_are(tmp_path: Path) -> None:
    x = RANDOM.normal(size=(12, 3))
    lists = pooled(write(tmp_path / "l.parquet", {"x": x.tolist(), "y": LABELS}))
    np.testing.assert_array_equal(lists.x, x.astype(np.float32))
    assert lists.spec.shape == (3,)
    # x10 comes after x2
    columns = {"x10": x[:, 2], "y": LABELS, "x1": x[:, 0], "x2": x[:, 1], "comment": ["?"] * 12}
    np.testing.assert_array_equal(pooled(write(tmp_path / "c.parquet", columns)).x, x.astype(np.float32))
    named = {"x_height": x[:, 0], "x_age": np.arange(12), "y": LABELS}
    found = pooled(write(tmp_path / "n.parquet", named)).x
    np.testing.assert_array_equal(found, np.column_stack([x[:, 0], np.arange(12)]).astype(np.float32))
    one = pooled(write(tmp_path / "o.parquet", {"depth": np.arange(12), "y": LABELS}), x="depth")
    np.testing.assert_array_equal(one.x[:, 0], np.arange(12))


def test_columns_can_be_named_and_classes_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "f.parquet", {"pixels": RAW, "digit": LABELS, "who": ["ann"] * 12, "label": [9] * 12})
    samples = pooled(path, x="pixels", y="digit", shape=(3, 5, 4), num_classes=7)
    assert samples.y.tolist() == LABELS and samples.spec.num_classes == 7
    opened = ParquetSource(path=path, x="pixels", y="digit", client="who", shape=(3, 5, 4)).open()
    assert isinstance(opened, NaturalPath)


SPLITS = ["train", "test", "train"] * 4


def test_splits_without_clients_are_parts(tmp_path: Path) -> None:
    path = write(tmp_path / "f.parquet", {"x": FLAT.astype(float).tolist(), "y": LABELS, "split": SPLITS})
    test = np.array(SPLITS) == "test"
    np.testing.assert_array_equal(pooled(path, part="test").x, FLAT[test])
    np.testing.assert_array_equal(pooled(path, part="train").x, FLAT[~test])
    np.testing.assert_array_equal(pooled(path).x, np.concatenate([FLAT[~test], FLAT[test]]))
    np.testing.assert_array_equal(pooled(path, split="none").x, FLAT)


def test_clients_keep_their_own_division(tmp_path: Path) -> None:
    owners = ["zoe", "ann", "bob"] * 4
    splits = ["train"] * 6 + ["test"] * 6
    columns = {"x": FLAT.astype(float).tolist(), "y": LABELS, "client": owners, "split": splits}
    dataset = clients_of({"path": str(write(tmp_path / "f.parquet", columns))}, holdout={"validation": 0})
    assert dataset.names == ("ann", "bob", "zoe")
    np.testing.assert_array_equal(dataset.sizes(), [[2, 0, 2]] * 3)
    np.testing.assert_array_equal(dataset.load(0)["train"].x.numpy(), FLAT[[1, 4]])
    np.testing.assert_array_equal(dataset.load(0)["test"].x.numpy(), FLAT[[7, 10]])
    part = clients_of({"path": str(tmp_path / "f.parquet"), "part": "train"}, holdout={"test": 0.5, "validation": 0})
    np.testing.assert_array_equal(part.sizes(), [[1, 0, 1]] * 3)
    numbered = write(tmp_path / "g.parquet", {**columns, "client": [10, 9, 2] * 4})
    assert clients_of({"path": str(numbered)}).names == ("10", "2", "9")
    iid = {"name": "iid", "num_clients": 2}
    together = clients_of({"path": str(tmp_path / "f.parquet"), "client": "none"}, partition=iid)
    assert together.sizes().sum() == 12


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcé"), st.booleans()), min_size=1, max_size=30))
def test_every_row_comes_back_with_its_client(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, bool]]
) -> None:
    rows = [("a", False), ("a", True), *rows]
    folder = tmp_path_factory.mktemp("rows")
    columns = {
        "x": [[float(row)] for row in range(len(rows))],
        "y": [0] * len(rows),
        "client": [client for client, _ in rows],
        "split": ["test" if test else "train" for _, test in rows],
    }
    path = write(folder / "f.parquet", columns)
    dataset = clients_of({"path": str(path), "root": str(folder)}, holdout={"validation": 0})
    assert dataset.names == tuple(sorted({client for client, test in rows if not test}))
    for client, name in enumerate(dataset.names):
        parts = dataset.load(client)
        for split, wanted in (("train", False), ("test", True)):
            own = [row for row, (owner, test) in enumerate(rows) if owner == name and test == wanted]
            assert parts[split].x[:, 0].tolist() == own


def test_the_copy_is_made_once_and_again_after_a_change(tmp_path: Path, data_root: Path) -> None:
    path = write(tmp_path / "f.parquet", {"x": [[1.0], [2.0]], "y": [0, 1]})
    source = ParquetSource(path=path)
    first = source.prepared_path
    assert pooled(path).x[:, 0].tolist() == [1, 2]
    made = first.stat().st_mtime_ns
    assert pooled(path).x[:, 0].tolist() == [1, 2]
    assert first.stat().st_mtime_ns == made and first.parent == data_root / "prepared"
    assert verify(first) == ([], [])
    time.sleep(0.01)
    write(path, {"x": [[3.0], [4.0]], "y": [0, 1]})
    assert pooled(path).x[:, 0].tolist() == [3, 4]
    assert source.prepared_path != first
    assert "has changed since" in verify(first)[0][0]


def test_relative_paths_are_looked_up_here_and_then_in_the_data_root(
    tmp_path: Path, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data_root.mkdir()
    write(data_root / "f.parquet", {"x": [[1.0]], "y": [0]})
    assert pooled(Path("f.parquet")).x.tolist() == [[1]]
    write(tmp_path / "f.parquet", {"x": [[2.0]], "y": [0]})
    assert pooled(Path("f.parquet")).x.tolist() == [[2]]
    with pytest.raises(DataError, match=r"dataset\.path: .*none\.parquet cannot be read: No such file"):
        pooled(Path("none.parquet"))


def test_one_of_path_and_paths_is_given() -> None:
    for options in ({}, {"path": "a", "paths": ["b"]}, {"path": "a", "shape": []}, {"path": "a", "shape": [0]}):
        with pytest.raises(ValidationError):
            ParquetSource.model_validate(options)


GOOD: dict[str, Any] = {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1], "client": ["a", "b"], "split": ["train", "train"]}
PNG, OTHER = encoded("PNG")[0], io.BytesIO()
Image.new("RGB", (2, 2)).save(OTHER, "PNG")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"y": [0.5, 1.0]}, {}, "column 'y' has the type double; labels are integers from 0"),
        ({"y": [0, None]}, {}, r"column 'y', row 1 \(client 'b'\) is null"),
        ({"y": [0, -1]}, {}, r"column 'y', row 1 \(client 'b'\) is -1"),
        ({"y": [0, 5]}, {"num_classes": 5}, "dataset.num_classes is 5, but there is a label 5"),
        ({"y": [0, 40000]}, {}, "40001 classes; data with clients have 32768 at most"),
        ({"x": [[1.0, 2.0], [3.0]]}, {}, r"column 'x', row 1 \(client 'b'\) has 1 values, but row 0 has 2"),
        ({"x": [[1.0, 2.0], None]}, {}, r"column 'x', row 1 \(client 'b'\) is null"),
        ({"x": [[1.0, 2.0], [3.0, None]]}, {}, r"column 'x', row 1 \(client 'b'\) has a null among"),
        ({"x": [[1.0, 2.0], [3.0, float("inf")]]}, {}, r"column 'x', row 1 \(client 'b'\) holds a value that"),
        ({"x": [[1.0, 2.0], [3.0, 4.0]]}, {"shape": (3,)}, r"dataset.shape is \[3\], 3 values, but .* have 2"),
        ({"x": ["a", "b"]}, {}, "the column 'x' has the type string; inputs are"),
        ({"x": [b"12", b"123"]}, {"shape": (2,)}, r"column 'x', row 1 \(client 'b'\) has 3 bytes, but row 0 has 2"),
        ({"x": [b"12", None]}, {"shape": (2,)}, r"column 'x', row 1 \(client 'b'\) is null"),
        ({"x": [b"12", b"34"]}, {}, r"column 'x' holds 2 raw bytes a row; say with dataset\.shape"),
        ({"x": [PNG, b"\x89PNG\r\n\x1a\n"]}, {}, r"column 'x', row 1 \(client 'b'\): the image cannot be decoded"),
        ({"x": [PNG, PNG[:-30]]}, {}, r"column 'x', row 1 \(client 'b'\): the image cannot be decoded"),
        (
            {"x": [PNG, OTHER.getvalue()]},
            {},
            r"column 'x', row 1 \(client 'b'\): the image has 2 x 2 .*row 0 \(client 'a'\) has 4 x 5",
        ),
        ({"x": [PNG, PNG]}, {"shape": (3, 4, 5)}, r"dataset.shape is \[3, 4, 5\], but the images have \[3, 5, 4\]"),
        ({"client": ["a", None]}, {}, "column 'client', row 1 is null"),
        ({"client": ["a", ""]}, {}, "column 'client', row 1 is an empty name"),
        ({"client": [[1], [2]]}, {}, "column 'client' has the type list"),
        ({"split": ["train", "valid"]}, {}, "column 'split', row 1 is 'valid'; it must be train or test"),
        ({"split": ["test", "test"]}, {}, "no client has both train and test rows"),
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
    with pytest.raises(DataError, match=r"b\.parquet is not a readable Parquet file"):
        ParquetSource(paths=(first, tmp_path / "b.parquet")).open()
    empty = write(tmp_path / "e.parquet", {"x": pa.array([], pa.list_(pa.float32())), "y": pa.array([], pa.int64())})
    with pytest.raises(DataError, match=r"e\.parquet: no rows"):
        ParquetSource(path=empty).open()


@needs_shared
def test_femnist() -> None:
    paths = [str(SHARED / f"femnist_{split}.parquet") for split in ("train", "test")]
    dataset = clients_of({"paths": paths, "shape": [1, 28, 28]}, transform={"normalize": "dataset"})
    assert (dataset.num_clients, dataset.spec.num_classes) == (300, 62)
    assert dataset.sizes().sum(0).tolist()[2] == 4763 and dataset.sizes().sum() == 46258
    first = pq.read_table(paths[1], filters=[("client", "==", dataset.names[0])])
    assert dataset.load(0)["test"].y.tolist() == first.column("label").to_pylist()
    plain = clients_of({"paths": paths, "shape": [1, 28, 28]}).load(0)["test"].x
    pixels = np.frombuffer(b"".join(first.column("image").to_pylist()), np.uint8).reshape(-1, 1, 28, 28)
    np.testing.assert_array_equal(plain.numpy(), pixels.astype(np.float32) / np.float32(255))


@needs_shared
def test_cifar10_from_encoded_images(tmp_path: Path) -> None:
    table = pq.read_table(SHARED / "cifar10_test.parquet").slice(0, 500)
    pq.write_table(table, tmp_path / "cifar10_test.parquet")
    samples = pooled(tmp_path / "cifar10_test.parquet")
    assert samples.x.shape == (500, 3, 32, 32) and samples.y[:3].tolist() == [3, 8, 8]
    with Image.open(io.BytesIO(table.column("image")[499].as_py())) as image:
        np.testing.assert_array_equal(samples.x[499], np.asarray(image).transpose(2, 0, 1))


@needs_shared
def test_mnist_by_writer_or_pooled() -> None:
    path = SHARED / "mnist_test.parquet"
    dataset = clients_of({"path": str(path), "shape": [1, 28, 28], "part": "test"})
    assert dataset.num_clients == 297 and dataset.sizes()[:, 2].min() > 0
    assert len(pooled(path, shape=(1, 28, 28), client="none").y) == 10_000


def png_of(width: int, height: int) -> bytes:
    """A PNG that says it is that large, with its pixels missing: nobody gets so far as to unpack them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


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


def test_images_that_do_not_fit_together_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise MemoryError

    monkeypatch.setattr("rayfl.data.images.images.np.empty", full)
    path = write(tmp_path / "f.parquet", {"image": [png_of(9000, 9000)] * 50, "label": [0, 1] * 25})
    with pytest.raises(DataError, match=r"row 0: 50 images of 9000 x 9000 pixels do not fit into memory \(4 GiB\)"):
        ParquetSource(path=path).open()
