"""Reading a file of natural clients: splits, validation, row groups, and files that are refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rayfl.data.sources.leaf import import_leaf
from rayfl.data.sources.natural import METADATA_KEY, LeafSource, NaturalDataset, NaturalHeader, write_natural
from rayfl.data.sources.root import data_root
from rayfl.errors import DataError
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams
from tests.support.leaf_sources import LEAF_ROOT, needs_leaf

STREAMS = RandomStreams(7)
TOKENS = NaturalHeader(kind="toy", input="tokens", shape=(2,), num_classes=50, vocabulary=100)
Row = tuple[str, str, int]


def rows_of(header: NaturalHeader, rows: Sequence[Row]) -> pa.Table:
    """Rows (client, split, label) whose every input value is the label."""
    schema = header.arrow_schema()
    size = schema.field("x").type.list_size
    content = {
        "client": [client for client, _, _ in rows],
        "split": [split for _, split, _ in rows],
        "x": [[label] * size for _, _, label in rows],
        "y": [label for _, _, label in rows],
    }
    return pa.Table.from_pydict(content, schema=schema)


def write(path: Path, *groups: Sequence[Row], header: NaturalHeader = TOKENS) -> Path:
    write_natural(path, header.arrow_schema(), [rows_of(header, rows) for rows in groups])
    return path


def samples(client: str, train: int, test: int) -> list[Row]:
    return [(client, "train" if n < train else "test", n) for n in range(train + test)]


def labels(dataset: NaturalDataset, client: int) -> dict[str, list[int]]:
    return {split: examples.y.tolist() for split, examples in dataset.load(client).items()}


def test_clients_are_the_names_with_train_samples(tmp_path: Path) -> None:
    path = write(tmp_path / "f", [*samples("ann", 2, 1), *samples("bob", 0, 3)], samples("eve", 1, 0))
    dataset = NaturalDataset(path, 0, STREAMS)
    assert dataset.names == ("ann", "eve")
    assert dataset.spec == InputSpec("tokens", (2,), 50, 100)
    np.testing.assert_array_equal(dataset.sizes(), [[2, 0, 1], [1, 0, 0]])
    assert dataset.sizes().dtype == np.int64
    assert labels(dataset, 0) == {"train": [0, 1], "validation": [], "test": [2]}
    assert labels(dataset, 1) == {"train": [0], "validation": [], "test": []}


def test_tokens_are_int64_and_empty_splits_have_the_shape_of_inputs(tmp_path: Path) -> None:
    parts = NaturalDataset(write(tmp_path / "f", samples("ann", 3, 0)), 0, STREAMS).load(0)
    assert parts["train"].x.dtype == parts["train"].y.dtype == torch.int64
    assert parts["train"].x.tolist() == [[0, 0], [1, 1], [2, 2]]
    assert parts["test"].x.shape == (0, 2)


@pytest.mark.parametrize(("storage", "scale"), [("uint8", 255), ("float32", 1)])
def test_images_are_float32_in_the_unit_interval(tmp_path: Path, storage: Any, scale: int) -> None:
    header = NaturalHeader(kind="toy", input="image", shape=(1, 2, 3), num_classes=9, storage=storage)
    parts = NaturalDataset(write(tmp_path / "f", samples("ann", 2, 1), header=header), 0, STREAMS).load(0)
    assert parts["train"].x.shape == (2, 1, 2, 3)
    assert parts["train"].x.dtype == torch.float32
    torch.testing.assert_close(parts["train"].x[1], torch.full((1, 2, 3), 1.0) / scale, rtol=0, atol=0)
    torch.testing.assert_close(parts["test"].x[0], torch.full((1, 2, 3), 2.0) / scale, rtol=0, atol=0)


def test_a_client_may_reach_over_row_groups(tmp_path: Path) -> None:
    rows = [*samples("ann", 2, 1), *samples("bob", 5, 4), *samples("eve", 1, 1)]
    path = write(tmp_path / "f", rows[:5], rows[5:8], rows[8:])
    whole = NaturalDataset(write(tmp_path / "g", rows), 0.5, STREAMS)
    parted = NaturalDataset(path, 0.5, STREAMS)
    assert [labels(parted, client) for client in range(3)] == [labels(whole, client) for client in range(3)]
    assert labels(parted, 1)["test"] == [5, 6, 7, 8]


def test_loading_a_client_reads_its_row_group_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = NaturalDataset(write(tmp_path / "f", *(samples(name, 2, 2) for name in "abc")), 0, STREAMS)
    read: list[list[int]] = []
    original = pq.ParquetFile.read_row_groups

    def recorded(file: pq.ParquetFile, groups: list[int], columns: list[str]) -> pa.Table:
        read.append(groups)
        return original(file, groups, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", recorded)
    parts = dataset.load(1)
    assert not read
    assert [len(parts[split]) for split in parts] == [2, 0, 2]
    assert read == [[1]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.floats(0, 0.95), st.integers(0, 3))
def test_validation_is_a_reproducible_part_of_train(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], validation: float, seed: int
) -> None:
    groups = [samples(f"client {position}", size, 3) for position, size in enumerate(sizes)]
    path = write(tmp_path_factory.mktemp("natural") / "f", *groups)
    dataset = NaturalDataset(path, validation, RandomStreams(seed))
    again = NaturalDataset(path, validation, RandomStreams(seed))
    for client, size in enumerate(sizes):
        parts = labels(dataset, client)
        assert len(parts["validation"]) == int(validation * size + 1e-9)
        assert sorted(parts["train"] + parts["validation"]) == list(range(size))
        assert parts["train"] == sorted(parts["train"])
        assert parts["validation"] == sorted(parts["validation"])
        assert parts["test"] == [size, size + 1, size + 2]
        assert labels(again, client) == parts
        assert dataset.sizes()[client].tolist() == [len(parts[split]) for split in ("train", "validation", "test")]


def test_validation_depends_on_the_seed_and_the_client(tmp_path: Path) -> None:
    path = write(tmp_path / "f", samples("ann", 40, 0), samples("bob", 40, 0))
    one, two = NaturalDataset(path, 0.5, RandomStreams(1)), NaturalDataset(path, 0.5, RandomStreams(2))
    assert labels(one, 0) != labels(two, 0)
    assert labels(one, 0) != labels(one, 1)


@pytest.mark.parametrize("validation", [-0.1, 1.0, float("nan")])
def test_a_validation_fraction_out_of_range_is_refused(tmp_path: Path, validation: float) -> None:
    path = write(tmp_path / "f", samples("ann", 4, 0))
    with pytest.raises(DataError, match="at least 0 and below 1"):
        NaturalDataset(path, validation, STREAMS)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.parquet does not exist; .*`rayfl data import-leaf`"):
        NaturalDataset(tmp_path / "none.parquet", 0, STREAMS)
    for name, command in (
        ("femnist.parquet", "import-leaf femnist SOURCE"),
        ("shakespeare-80.parquet", "import-leaf shakespeare SOURCE"),
        ("celeba.parquet", "import-leaf celeba SOURCE --images IMAGES"),
        ("reddit.parquet", "import-leaf reddit SOURCE --sequences"),
        ("tff-emnist.parquet", "import-tff emnist SOURCE"),
    ):
        path = tmp_path / name
        said = rf"{path} does not exist; .*`rayfl data {command} --out {path}`, or set RAYFL_DATA"
        with pytest.raises(DataError, match=said):
            NaturalDataset(path, 0, STREAMS)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(DataError, match=r"f is not a readable Parquet file: .*`rayfl data import-leaf`"):
        NaturalDataset(tmp_path / "f", 0, STREAMS)


def test_a_foreign_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "f")
    with pytest.raises(DataError, match=r"f is a Parquet file, but not one of rayfl's; .*`rayfl data import-leaf`"):
        NaturalDataset(tmp_path / "f", 0, STREAMS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"version": 3, "layout": "new"}), "has version 3 of the format and this rayfl reads up to 2"),
        (json.dumps({"version": "1"}), "damaged header"),
        ("{}", "damaged header"),
        ("[]", "damaged header"),
        ("{", "damaged header"),
        (TOKENS.model_copy(update={"format": "other"}).model_dump_json(), "damaged header"),
        (TOKENS.model_copy(update={"shape": (3,)}).model_dump_json(), "not those that the header promises"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    table = rows_of(TOKENS, samples("ann", 2, 0)).replace_schema_metadata({METADATA_KEY: text})
    pq.write_table(table, tmp_path / "f")
    with pytest.raises(DataError, match=rf"f.*{message}.*`rayfl data import-leaf`"):
        NaturalDataset(tmp_path / "f", 0, STREAMS)


@pytest.mark.parametrize(
    "rows",
    [
        [*samples("bob", 1, 0), *samples("ann", 1, 0)],
        [*samples("ann", 1, 0), *samples("bob", 1, 0), *samples("ann", 1, 0)],
        [("ann", "test", 0), ("ann", "train", 1)],
        [("ann", "train", 0), ("ann", "test", 1), ("ann", "train", 2)],
    ],
)
def test_rows_out_of_order_are_refused(tmp_path: Path, rows: list[Row]) -> None:
    path = write(tmp_path / "f", rows)
    with pytest.raises(DataError, match="f: the rows of client 'ann' are not in order"):
        NaturalDataset(path, 0, STREAMS)


def test_an_unknown_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="other values than train and test"):
        NaturalDataset(write(tmp_path / "f", [("ann", "dev", 0)]), 0, STREAMS)


@pytest.mark.parametrize("groups", [[], [samples("ann", 0, 2)]])
def test_a_file_without_train_samples_is_refused(tmp_path: Path, groups: list[list[Row]]) -> None:
    with pytest.raises(DataError, match="no client has a train sample"):
        NaturalDataset(write(tmp_path / "f", *groups), 0, STREAMS)


def test_a_damaged_page_names_the_client(tmp_path: Path) -> None:
    path = write(tmp_path / "f", samples("ann", 40, 0), samples("bob", 40, 0))
    column = pq.ParquetFile(path).metadata.row_group(1).column(2)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + column.total_compressed_size] = bytes(column.total_compressed_size)
    path.write_bytes(content)
    dataset = NaturalDataset(path, 0, STREAMS)
    assert len(dataset.load(0)["train"]) == 40
    bob = dataset.load(1)
    with pytest.raises(DataError, match="f: client 'bob' cannot be read"):
        bob["train"]


def test_source_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path))
    assert LeafSource(path=Path("femnist.parquet")).resolved_path == tmp_path / "femnist.parquet"
    assert LeafSource(path=Path("/data/f.parquet")).resolved_path == Path("/data/f.parquet")
    assert LeafSource(path=Path("~/f.parquet")).resolved_path == Path.home() / "f.parquet"
    for unset in ("", None):
        monkeypatch.delenv("RAYFL_DATA") if unset is None else monkeypatch.setenv("RAYFL_DATA", unset)
        assert data_root() == Path.home() / ".cache" / "rayfl"


def test_source_refuses_unknown_fields() -> None:
    with pytest.raises(ValidationError, match="folder"):
        LeafSource.model_validate({"path": "f.parquet", "folder": "x"})


@needs_leaf
def test_real_femnist(tmp_path: Path) -> None:
    path = import_leaf("femnist", LEAF_ROOT / "femnist" / "data", tmp_path / "f.parquet").destination
    dataset = NaturalDataset(path, 0.1, STREAMS)
    assert dataset.num_clients == 51
    assert dataset.sizes().sum() == 7236 + 829
    assert dataset.sizes()[:, 2].sum() == 829
    parts = dataset.load(50)
    assert [len(parts[split]) for split in ("train", "validation", "test")] == dataset.sizes()[50].tolist()
    assert parts["train"].x.shape[1:] == (1, 28, 28)
    # LEAF's background is white.
    assert 0.8 < parts["train"].x.mean() < 1
