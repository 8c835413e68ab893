"""Parquet files of your own: every way to store inputs, and copies of them."""

from __future__ import annotations

import io
import os
import time
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
from rayfl.data.sources.preparation.inventory import verify
from rayfl.data.sources.rows.parquet import ParquetSource
from rayfl.errors import DataError
from rayfl.experiment.parts import Parts
from tests.support.parquet_files import PIXELS, RANDOM, encoded, write

SHARED = Path(os.environ.get("RAYFL_TEST_DATA") or Path(__file__).resolve().parents[5] / "shared" / "data")
needs_shared = pytest.mark.skipif(
    not (SHARED / "femnist_train.parquet").exists(),
    reason=f"no femnist_train.parquet in {SHARED}; set RAYFL_TEST_DATA to the folder that has it",
)
LABELS = [0, 1, 2] * 4


@pytest.fixture(autouse=True)
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


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
    with pytest.raises(
        DataError, match=r"dataset\.path: .*none\.parquet cannot be read: No such file.*; put the file there"
    ):
        pooled(Path("none.parquet"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("f.csv", "x1,y\n1,0\n2,1\n"),
        ("f.json", '[{"x1": 1, "y": 0}, {"x1": 2, "y": 1}]'),
        ("f.jsonl", '{"x1": 1, "y": 0}\n{"x1": 2, "y": 1}\n'),
    ],
)
def test_a_mark_of_utf_8_before_a_text_is_no_part_of_it(tmp_path: Path, name: str, text: str) -> None:
    """As programs of Windows write it."""
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    samples = ParquetSource(path=tmp_path / name).open()
    assert isinstance(samples, Samples)
    assert samples.x.tolist() == [[1.0], [2.0]] and samples.y.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "text"),
    [("f.json", '[{"x1": 1, "y": 0, "x1": 2}, {"x1": 2, "y": 1}]'), ("f.jsonl", '{"x1": 1, "y": 0, "x1": 2}\n')],
)
def test_a_key_of_json_stands_once_in_a_row(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name} is not a readable JSON file: the key 'x1' stands twice in one obj"):
        ParquetSource(path=tmp_path / name).open()


def test_one_of_path_and_paths_is_given() -> None:
    for options in ({}, {"path": "a", "paths": ["b"]}, {"path": "a", "shape": []}, {"path": "a", "shape": [0]}):
        with pytest.raises(ValidationError):
            ParquetSource.model_validate(options)


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
