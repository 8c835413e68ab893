"""Listing prepared files, and finding out that one is no longer what it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayfl.data.files.natural_file import NaturalHeader, write_natural
from rayfl.data.files.records import record_path
from rayfl.data.sources.preparation.inventory import inventory, prepared_files, verify
from rayfl.data.sources.preparation.pooled_file import PooledFile
from rayfl.data.sources.preparation.preparing import Order
from rayfl.data.sources.rows.parquet import ParquetSource
from tests.data.sources.test_natural import rows_of, samples


def prepared(root: Path, clients: bool) -> Path:
    x = np.random.default_rng(0).integers(0, 256, (6, 4), dtype=np.uint8)
    columns = {"x": pa.array(x.tolist(), pa.list_(pa.uint8())), "y": [0, 1, 2] * 2}
    if clients:
        columns["client"] = ["ann", "bob"] * 3
    root.mkdir(parents=True, exist_ok=True)
    path = root / ("with.table" if clients else "without.table")
    pq.write_table(pa.table(columns), path)
    return ParquetSource(path=path, root=root).prepare(Order())


def test_everything_in_a_data_root_is_listed(tmp_path: Path) -> None:
    pooled, natural = prepared(tmp_path, clients=False), prepared(tmp_path, clients=True)
    header = NaturalHeader(kind="leafy", input="image", shape=(1, 2, 2), num_classes=9)
    write_natural(tmp_path / "leaf.parquet", header.arrow_schema(), [rows_of(header, samples("ann", 3, 1))])
    pq.write_table(pa.table({"a": [1]}), tmp_path / "foreign.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    found = {entry.path: entry for entry in inventory(tmp_path)}
    assert set(found) == {pooled, natural, tmp_path / "leaf.parquet"} == set(prepared_files(tmp_path))
    assert found[pooled].content == "6 train, 4, 3 classes"
    assert found[natural].content == "6 samples of 2 clients, 4, 3 classes"
    assert found[natural].source == str(tmp_path / "with.table")
    assert found[pooled].size == pooled.stat().st_size
    leaf = found[tmp_path / "leaf.parquet"]
    assert (leaf.kind, leaf.content, leaf.source) == ("leafy", "4 samples of 1 client, 1 x 2 x 2, 9 classes", "")


def test_a_damaged_file_is_listed_as_such(tmp_path: Path) -> None:
    path = prepared(tmp_path, clients=False)
    path.write_bytes(b"ARROW1")
    assert inventory(tmp_path)[0].content.startswith("damaged: ")
    wrong, _ = verify(path)
    assert "cannot be read" in wrong[0]


def test_a_changed_pixel_is_found_in_file_and_content(tmp_path: Path) -> None:
    for clients in (False, True):
        path = prepared(tmp_path, clients)
        assert verify(path) == ([], [])
        content = bytearray(path.read_bytes())
        # the pixels as they lie in the file, sorted by client or not
        x = np.random.default_rng(0).integers(0, 256, (6, 4), dtype=np.uint8)
        row = content.find(x[4].tobytes())
        content[row] ^= 1
        path.write_bytes(content)
        wrong, _ = verify(path)
        assert len(wrong) == 2
        assert "the content has the sha256" in wrong[0] and "the file has the sha256" in wrong[1]


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    path = prepared(tmp_path, clients=False)
    (tmp_path / "without.table").unlink()
    wrong, unknown = verify(path)
    assert wrong == [] and "is gone" in unknown[0]
    record_path(path).unlink()
    assert verify(path) == ([], ["there is no record of the file's checksum"])
    record_path(path).write_text("{")
    assert "is damaged" in verify(path)[0][0]
    header = NaturalHeader(kind="leafy", input="image", shape=(1, 2, 2), num_classes=9)
    write_natural(tmp_path / "leaf.parquet", header.arrow_schema(), [rows_of(header, samples("ann", 3, 1))])
    assert len(verify(tmp_path / "leaf.parquet")[1]) == 2


def test_a_file_without_a_record_is_prepared_again(tmp_path: Path) -> None:
    path = prepared(tmp_path, clients=False)
    record_path(path).unlink()
    path.write_bytes(b"")
    assert ParquetSource(path=tmp_path / "without.table", root=tmp_path).prepare(Order()) == path
    assert len(PooledFile(path).y) == 6 and verify(path) == ([], [])
