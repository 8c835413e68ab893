"""Partitions, trees, commits and leases: damage is found and named, never passed on."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.data.partitions.assignment import ASSIGNMENT_SCHEMA, FilePartition
from rayfl.errors import DamageError, DataError, RunError
from rayfl.runs.verification import verify
from rayfl.storage import treefile
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.lease import FILE, read_lease
from rayfl.storage.manifest import Manifest
from tests.support.fuzz_inputs import QUICK, THOROUGH, VALUES, damaged, tried


def written(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


PARTITION = written(
    pa.table({"client": [0, 0, 1, 1], "split": ["train", "test"] * 2, "sample": [0, 1, 2, 3]}, ASSIGNMENT_SCHEMA)
)
ROWS = st.lists(
    st.tuples(
        st.none() | st.integers(-2, 3) | st.sampled_from([2**31 - 1, -(2**31)]),
        st.none() | st.sampled_from(["train", "validation", "test", "public", "?", ""]),
        st.none() | st.integers(-1, 5) | st.sampled_from([2**62]),
    ),
    max_size=6,
)
TABLES_OF_CLIENTS = ROWS.map(
    lambda rows: written(pa.table(list(zip(*rows, strict=True)) or [[], [], []], schema=ASSIGNMENT_SCHEMA))
)


def checked_partition(folder: Path, content: bytes) -> None:
    """A partition gives everybody's samples, each once, or the error names the file."""
    path = folder / "fuzzed.parquet"
    path.write_bytes(content)
    found, message = tried(DataError, lambda: FilePartition(path=path).splits(6))
    if found is None:
        assert str(path) in message
    else:
        clients, public = found
        taken = np.concatenate([public, *(places[split] for places in clients for split in places)])
        assert len(np.unique(taken)) == len(taken)
        assert all(len(places["train"]) for places in clients)
        assert clients


@QUICK
@given(damaged(PARTITION) | TABLES_OF_CLIENTS)
def test_partition_files(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    checked_partition(tmp_path_factory.getbasetemp(), content)


@pytest.mark.slow
@THOROUGH
@given(damaged(PARTITION) | TABLES_OF_CLIENTS)
def test_partition_files_thoroughly(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    checked_partition(tmp_path_factory.getbasetemp(), content)


TREE = {
    "model": {"w": torch.arange(6.0).reshape(2, 3), "n": 3},
    "empty": {},
    "flag": True,
    "half": torch.ones(3).half(),
}


def checked_tree(content: bytes) -> None:
    """A tree is read, or the error names the file."""
    tree, message = tried(DamageError, lambda: treefile.loads(content, "the-file"))
    assert tree is not None or "the-file" in message


HEADERS = st.dictionaries(st.sampled_from(["numbers", "order", "x"]), VALUES, max_size=3)


def with_header(header: Any) -> bytes:
    """A well-formed safetensors file whose own header is something else."""
    try:
        text = json.dumps(header)
    except TypeError:
        text = repr(header)
    outer = json.dumps({"__metadata__": {"rayfl": text}}).encode()
    return len(outer).to_bytes(8, "little") + outer


TREES = damaged(treefile.dumps(TREE)) | HEADERS.map(with_header)


@QUICK
@given(TREES)
def test_tree_files(content: bytes) -> None:
    checked_tree(content)


@pytest.mark.slow
@THOROUGH
@given(TREES)
def test_tree_files_thoroughly(content: bytes) -> None:
    checked_tree(content)


def a_run(folder: Path) -> CommitStore:
    """Two commits."""
    store = CommitStore(Storage(str(folder)))
    for rounds in (1, 2):
        states = store.write_states(rounds, 0, {0: {"x": torch.ones(2)}})
        server, table = store.write_server(rounds, TREE), store.write_table(rounds, "rounds", PARTITION)
        store.write_manifest(
            Manifest(
                rounds_completed=rounds, fingerprint="f", server=server, states={0: states}, tables={"rounds": table}
            )
        )
    return store


MANIFESTS = st.dictionaries(st.sampled_from([*Manifest.model_fields, "checksum", "x"]), VALUES, max_size=9).map(
    lambda content: json.dumps(content, default=repr).encode()
)


def as_json(content: bytes) -> Any:
    """What a manifest says, however it is written; what is no JSON differs from everything."""
    try:
        return json.loads(content)
    except ValueError:
        return object()


def two_commits(folder: Path) -> CommitStore:
    """The same two commits, in a folder that may have others."""
    for path in folder.glob("**/*"):
        if path.is_file():
            path.unlink()
    return a_run(folder)


def checked_commit(folder: Path, choice: int, replacement: bytes | None, data: st.DataObject) -> None:
    """With one file changed, the newest whole commit is found, or the error says what is wrong; verify always ends."""
    store = two_commits(folder)
    files = sorted((folder / "commits").iterdir())
    path = files[choice % len(files)]
    checked_replacement(
        folder, store, path, data.draw(damaged(path.read_bytes())) if replacement is None else replacement
    )


def checked_replacement(folder: Path, store: CommitStore, path: Path, replacement: bytes) -> None:
    """The same for one file and what it then contains."""
    first = store.read_manifest("manifest-000001.json")
    before = path.read_bytes()
    path.write_bytes(replacement)
    same = replacement == before or as_json(replacement) == as_json(before)
    report = verify(Storage(str(folder)))
    # A whole manifest of other files is to blame for these.
    blamed = [path.name, *re.findall(r"[a-z]+-[0-9][0-9-]*[0-9a-f]+\.[a-z]+", replacement.decode(errors="ignore"))]
    found_out = any(name in problem for name in blamed for problem in report.problems)
    assert found_out or same or path.name == "newest.json"
    found, message = tried(RunError, lambda: store.latest(thoroughly=True))
    if found is None:
        assert path.name in message
    else:
        assert same or path.name not in {*found.files(), f"manifest-{found.rounds_completed:06d}.json"}
        if path.name in first.files():
            assert found.rounds_completed == 2
        assert set(store.read_states(found.states[0])) == {0}
        store.read_server(found)


@QUICK
@given(choice=st.integers(0, 20), replacement=st.none() | MANIFESTS, data=st.data())
def test_commits(
    tmp_path_factory: pytest.TempPathFactory, choice: int, replacement: bytes | None, data: st.DataObject
) -> None:
    checked_commit(tmp_path_factory.getbasetemp() / "commits", choice, replacement, data)


@pytest.mark.slow
@settings(THOROUGH, max_examples=600)
@given(choice=st.integers(0, 20), replacement=st.none() | MANIFESTS, data=st.data())
def test_commits_thoroughly(
    tmp_path_factory: pytest.TempPathFactory, choice: int, replacement: bytes | None, data: st.DataObject
) -> None:
    checked_commit(tmp_path_factory.getbasetemp() / "commits-2", choice, replacement, data)


@QUICK
@given(VALUES.map(lambda value: json.dumps(value, default=repr).encode()) | st.binary(max_size=30))
def test_leases(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    storage = Storage(str(tmp_path_factory.getbasetemp() / "leases"))
    storage.write(FILE, content)
    with pytest.raises(RunError, match=r"lease\.json"):
        read_lease(storage)
