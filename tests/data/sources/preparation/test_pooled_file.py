"""Prepared files without clients: written once, memory-mapped, shared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.data.files.content import ContentHash
from rayfl.data.files.natural_file import METADATA_KEY
from rayfl.data.images.moments import moments_of
from rayfl.data.partitions.base import IIDPartition
from rayfl.data.partitions.holdout import HoldoutConfig
from rayfl.data.sources.preparation.pooled import PooledDataset
from rayfl.data.sources.preparation.pooled_file import PooledFile
from rayfl.data.sources.preparation.pooled_writing import write_pooled, write_rows
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

RANDOM = np.random.default_rng(0)
TRAIN = RANDOM.integers(0, 256, (30, 3, 4, 5), dtype=np.uint8), RANDOM.integers(0, 7, 30)
TEST = RANDOM.integers(0, 256, (11, 3, 4, 5), dtype=np.uint8), RANDOM.integers(0, 7, 11)


def written(path: Path) -> Path:
    write_pooled(path, "toy", {"train": TRAIN, "test": TEST}, 7, "somewhere")
    return path


def test_the_parts_come_back(tmp_path: Path) -> None:
    file = PooledFile(written(tmp_path / "new" / "toy.arrow"))
    for part, (x, y) in (("train", TRAIN), ("test", TEST)):
        samples = file.samples(part)  # type: ignore[arg-type]
        np.testing.assert_array_equal(samples.x, x)
        np.testing.assert_array_equal(samples.y, y)
        assert samples.moments == moments_of(x)
    both = file.samples("both")
    np.testing.assert_array_equal(both.x, np.concatenate([TRAIN[0], TEST[0]]))
    np.testing.assert_array_equal(both.y, np.concatenate([TRAIN[1], TEST[1]]))
    assert both.spec.shape == (3, 4, 5) and both.spec.num_classes == 7 and both.y.dtype == np.int64
    assert both.moments is not None
    np.testing.assert_allclose(both.moments.mean, moments_of(both.x).mean)
    assert (file.header.kind, file.header.source, file.header.storage) == ("toy", "somewhere", "uint8")


def test_nothing_is_copied_and_nothing_can_be_written(tmp_path: Path) -> None:
    path = written(tmp_path / "toy.arrow")
    before = pa.total_allocated_bytes()
    samples = PooledFile(path).samples("test")
    assert pa.total_allocated_bytes() == before
    assert not samples.x.flags.owndata and not samples.x.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        samples.x[0] = 0


def test_clients_of_a_mapped_file_are_those_of_the_arrays(tmp_path: Path) -> None:
    samples = PooledFile(written(tmp_path / "toy.arrow")).samples("train")
    streams = RandomStreams(3)
    parts = IIDPartition(num_clients=3).assign(samples.y, streams)
    datasets = [
        PooledDataset(x, y, samples.spec, parts, HoldoutConfig(), streams) for x, y in ((samples.x, samples.y), TRAIN)
    ]
    for client in range(3):
        mapped, held = (dataset.load(client) for dataset in datasets)
        for split, examples in mapped.items():
            assert (examples.x == held[split].x).all() and (examples.y == held[split].y).all()
            assert datasets[0].labels(client)[split].tolist() == examples.y.tolist()
    mapped["train"].x.add_(1)  # fresh memory


def test_floats_are_kept(tmp_path: Path) -> None:
    x = RANDOM.normal(size=(6, 2)).astype(np.float32)
    write_pooled(tmp_path / "f.arrow", "toy", {"train": (x, np.arange(6))}, 6, "")
    file = PooledFile(tmp_path / "f.arrow")
    np.testing.assert_array_equal(file.samples("both").x, x)
    assert file.header.storage == "float32"
    with pytest.raises(DataError, match="has no part 'test', only train"):
        file.samples("test")


def test_a_label_beyond_the_classes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="labels of the part train run from 0 to 6, but there are 6 classes"):
        write_pooled(tmp_path / "f.arrow", "toy", {"train": (TRAIN[0], np.arange(30) % 7)}, 6, "here")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"ARROW1", b"PAR1" * 50])
def test_a_file_that_is_not_arrow_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f.arrow").write_bytes(content)
    with pytest.raises(DataError, match=r"f\.arrow cannot be read.*rayfl data prepare"):
        PooledFile(tmp_path / "f.arrow")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2 of the format and this rayfl reads up to 1"),
        ({"format": "natural"}, "is not a prepared data set"),
        ({"shape": [3, 4, 6]}, "not those that the header promises"),
        ({"parts": {}}, "not those that the header promises"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    table = pa.ipc.open_file(str(written(tmp_path / "toy.arrow"))).read_all()
    header = json.dumps({**json.loads(table.schema.metadata[METADATA_KEY]), **change})
    other = table.replace_schema_metadata({METADATA_KEY: header})
    with pa.ipc.new_file(str(tmp_path / "f.arrow"), other.schema) as writer:
        writer.write_table(other)
    with pytest.raises(DataError, match=message):
        PooledFile(tmp_path / "f.arrow")


def test_equal_data_make_equal_files_and_another_pixel_another_checksum(tmp_path: Path) -> None:
    one, two = written(tmp_path / "1.arrow"), written(tmp_path / "2.arrow")
    assert one.read_bytes() == two.read_bytes()
    x = TRAIN[0].copy()
    x[29, 2, 3, 4] ^= 1
    other = write_pooled(tmp_path / "3.arrow", "toy", {"train": (x, TRAIN[1]), "test": TEST}, 7, "somewhere")
    file = PooledFile(one)
    assert file.content_hash() == file.header.sha256 != other.sha256


def test_clients_are_named_in_the_header_and_are_part_of_the_content(tmp_path: Path) -> None:
    x, y = (np.concatenate(arrays) for arrays in zip(TRAIN, TEST, strict=True))
    rows = {"train": 30, "test": 11}
    clients = {"train": {"b": 20, "a": 10}, "test": {"c": 11}}
    header = write_rows(tmp_path / "1.arrow", "toy", x, y, rows, 7, "somewhere", clients=clients)
    file = PooledFile(tmp_path / "1.arrow")
    for part, names in (("train", ["b"] * 20 + ["a"] * 10), ("test", ["c"] * 11)):
        owners = file.samples(part).clients  # type: ignore[arg-type]
        assert owners is not None and owners.tolist() == names
    assert file.content_hash() == header.sha256
    other = {**clients, "train": {"b": 19, "a": 11}}
    assert write_rows(tmp_path / "2.arrow", "toy", x, y, rows, 7, "somewhere", clients=other).sha256 != header.sha256
    write_rows(tmp_path / "3.arrow", "toy", x, y, rows, 7, "somewhere", clients={"train": {"b": 3}, "test": {"c": 1}})
    with pytest.raises(DataError, match="not those that the header promises"):
        PooledFile(tmp_path / "3.arrow")


def test_parts_that_lie_side_by_side_are_one(tmp_path: Path) -> None:
    x, y = (np.concatenate(arrays) for arrays in zip(TRAIN, TEST, strict=True))
    write_rows(tmp_path / "f.arrow", "toy", x, y, {"validation": 9, "train": 21, "test": 11}, 7, "somewhere")
    file = PooledFile(tmp_path / "f.arrow")
    for parts, first, last in ((["validation", "train"], 0, 30), (["train", "test"], 9, 41), (["train"], 9, 30)):
        samples = file.neighbours(parts)
        np.testing.assert_array_equal(samples.x, x[first:last])
        np.testing.assert_array_equal(samples.y, y[first:last])
        assert samples.moments is not None and samples.x.base is not None
        np.testing.assert_allclose(samples.moments.mean, moments_of(x[first:last]).mean)
    with pytest.raises(DataError, match="has no part 'other', only validation, train, test"):
        file.neighbours(["other"])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 30), st.booleans())
def test_the_content_hash_does_not_depend_on_portions(cut: int, named: bool) -> None:
    x, y = TRAIN
    names = [f"client {row % 3}" for row in range(30)] if named else []
    whole = ContentHash().update(x, y, names)
    parts = ContentHash().update(x[:cut], y[:cut], names[:cut]).update(x[cut:], y[cut:].astype(np.int16), names[cut:])
    assert whole.hexdigest() == parts.hexdigest()
    assert ContentHash().update(x, y[::-1], names).hexdigest() != whole.hexdigest() or (y == y[::-1]).all()
