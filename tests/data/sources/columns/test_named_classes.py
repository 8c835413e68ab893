"""Classes told by text, or by true and false, in a user's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayfl.data.sources.base import Samples
from rayfl.data.sources.rows.parquet import ParquetSource
from rayfl.errors import DataError

X = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]


@pytest.fixture(autouse=True)
def data_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


def file_of(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table({"x": X[: len(next(iter(columns.values())))], **columns}), path)
    return path


def labels_of(source: ParquetSource) -> tuple[list[int], int]:
    opened = source.open()
    assert isinstance(opened, Samples)
    return opened.y.tolist(), opened.spec.num_classes


TEXTS = ["no", "yes", "Maybe", "no"]


@pytest.mark.parametrize(
    "y",
    [TEXTS, pa.array(TEXTS, pa.large_string()), pa.array(TEXTS).dictionary_encode()],
    ids=["string", "large_string", "dictionary"],
)
def test_texts_are_numbered_in_ascending_order_and_the_copy_says_how(y: Any, tmp_path: Path) -> None:
    source = ParquetSource(path=file_of(tmp_path / "a.parquet", y=y), labels="renumbered")
    assert labels_of(source) == ([1, 2, 0, 1], 3)
    record = json.loads(source.prepared_path.with_name(f"{source.prepared_path.name}.json").read_text())
    assert record["options"]["classes"] == ["Maybe", "no", "yes"]


def test_classes_of_all_files_are_numbered_together(tmp_path: Path) -> None:
    paths = (file_of(tmp_path / "a.parquet", y=["c", "a"]), file_of(tmp_path / "b.parquet", y=["b", "a"]))
    assert labels_of(ParquetSource(paths=paths, labels="renumbered")) == ([2, 0, 1, 0], 3)


def test_classes_of_texts_may_be_texts(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a b", "b c", "c a"], "y": ["good", "bad", "good"]}), tmp_path / "t.parquet")
    source = ParquetSource(path=tmp_path / "t.parquet", x="text", tokenizer="words", length=2, labels="renumbered")
    assert labels_of(source) == ([1, 0, 1], 2)


def test_false_and_true_are_the_classes_0_and_1(tmp_path: Path) -> None:
    assert labels_of(ParquetSource(path=file_of(tmp_path / "a.parquet", y=[True, False, True]))) == ([1, 0, 1], 2)


def test_texts_are_not_numbered_unasked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'y' has the type string; .*: dataset.labels=renumbered numbers"):
        ParquetSource(path=file_of(tmp_path / "a.parquet", y=TEXTS)).open()


def test_what_is_no_class_is_named(tmp_path: Path) -> None:
    empty = file_of(tmp_path / "a.parquet", y=["no", " ", "yes"], client=["k", "k", "l"])
    with pytest.raises(DataError, match=r"column 'y', row 1 \(client 'k'\) is an empty text"):
        ParquetSource(path=empty, labels="renumbered").open()
    both = (file_of(tmp_path / "b.parquet", y=["1", "2"]), file_of(tmp_path / "c.parquet", y=[1, 2]))
    with pytest.raises(DataError, match=r"c.parquet: column 'y' holds numbers, but that of .*b.parquet text"):
        ParquetSource(paths=both, labels="renumbered").open()
