"""Tables as Parquet files, whole and in parts."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rayfl.storage.tables
from rayfl.errors import DamageError
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import Manifest
from rayfl.storage.tables import PartedTable, from_parquet, read_whole, same_rows, to_one_parquet, to_parquet

SCHEMA = pa.schema([("round", pa.int32()), ("name", pa.string()), ("loss", pa.float64())], {b"key": b"value"})


def rows(start: int, stop: int) -> pa.Table:
    numbers = range(start, stop)
    columns = {"round": numbers, "name": [f"client {n}" for n in numbers], "loss": [n / 7 for n in numbers]}
    return pa.table({name: list(values) for name, values in columns.items()}, SCHEMA)


@pytest.fixture
def store(tmp_path: Path) -> CommitStore:
    return CommitStore(Storage(str(tmp_path)))


def manifest(store: CommitStore, table: PartedTable) -> Manifest:
    return Manifest(
        rounds_completed=1, fingerprint="print", server=store.write_server(1, {"w": 1}), tables={"rounds": table.files}
    )


@pytest.mark.parametrize("sizes", [[10], [0, 3, 0, 7], [1] * 10, [6, 4]])
def test_how_rows_are_divided_does_not_change_the_file(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rayfl.storage.tables, "GROUP_ROWS", 4)
    parts = [rows(start, stop) for start, stop in pairwise(np.cumsum([0, *sizes]).tolist())]
    data = to_one_parquet(iter(parts), SCHEMA)
    assert data == to_parquet(rows(0, 10))
    found = from_parquet(data)
    assert found.equals(rows(0, 10))
    assert found.schema.metadata == SCHEMA.metadata


def test_a_table_without_rows() -> None:
    assert from_parquet(to_parquet(rows(0, 0))).equals(rows(0, 0))


def test_rows_are_the_same_to_the_bit() -> None:
    def of(*values: float | None) -> pa.Table:
        return pa.table({"loss": pa.array(values, pa.float64())})

    assert same_rows(of(1.0, math.nan, None), pa.concat_tables([of(1.0), of(math.nan, None)]))
    assert not same_rows(of(1.0), of(math.nextafter(1.0, 2.0)))
    assert not same_rows(of(0.0), of(-0.0))
    assert not same_rows(of(None), of(0.0))
    assert not same_rows(of(1.0), of(1.0, 1.0))
    assert not same_rows(of(1.0), of(1.0).rename_columns(["top1"]))


@settings(max_examples=15, deadline=None)
@given(growth=st.lists(st.integers(0, 40), max_size=12), seed=st.integers(0, 99))
def test_a_table_in_parts_is_the_table(tmp_path_factory: pytest.TempPathFactory, growth: list[int], seed: int) -> None:
    folder = tmp_path_factory.mktemp("parts")
    store, random = CommitStore(Storage(str(folder))), np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rayfl.storage.tables, "LARGE_PART_BYTES", 1500)
        table, end = PartedTable("rounds"), 0
        for commit, more in enumerate(growth):
            grew = table.append(store, commit, rows(end, end + more))
            assert grew == (more > 0 or commit == 0)
            end += more
            assert table.rows == end
            found = read_whole(store, manifest(store, table), "rounds")
            assert found.equals(rows(0, end))
            if random.random() < 0.2:
                table, schema = PartedTable.restored(store, manifest(store, table), "rounds")
                assert schema.equals(SCHEMA, check_metadata=True)


def test_a_commit_writes_few_rows_and_leaves_few_parts(store: CommitStore, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    real = to_parquet

    def counting(table: pa.Table) -> bytes:
        written.append(table.num_rows)
        return real(table)

    monkeypatch.setattr(rayfl.storage.tables, "to_parquet", counting)
    monkeypatch.setattr(rayfl.storage.tables, "LARGE_PART_BYTES", 5_000)
    table, commits, each = PartedTable("rounds"), 200, 20
    for commit in range(commits):
        table.append(store, commit, rows(table.rows, table.rows + each))
        assert len(table.files) <= 1 + table.rows // 500 + math.log2(commit + 2)
    # What is written at once does not grow with the table.
    assert max(written[: commits // 2]) == max(written)
    assert max(written) < 0.5 * table.rows
    assert sum(written) < 10 * table.rows


def test_a_missing_and_a_damaged_part_are_named(store: CommitStore, tmp_path: Path) -> None:
    table = PartedTable("rounds")
    table.append(store, 1, rows(0, 5))
    table.append(store, 2, rows(5, 7))
    found = manifest(store, table)
    first, last = table.files
    with pytest.raises(DamageError, match="the commit of round 1 has no table of clients"):
        read_whole(store, found, "clients")
    (tmp_path / "commits" / last.name).unlink()
    with pytest.raises(DamageError, match=f"{last.name} is missing"):
        read_whole(store, found, "rounds")
    (tmp_path / "commits" / first.name).write_bytes(b"x")
    with pytest.raises(DamageError, match=f"{first.name} in .* is damaged"):
        PartedTable.restored(store, found, "rounds")


def test_what_is_no_table_is_named(store: CommitStore) -> None:
    table = PartedTable("rounds")
    table.append(store, 1, rows(0, 5))
    text = {"tables": {"rounds": (store.write_table(1, "rounds", b"text"),)}}
    with pytest.raises(DamageError, match=r"rounds-000001-.* is damaged"):
        read_whole(store, manifest(store, table).model_copy(update=text), "rounds")
