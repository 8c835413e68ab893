"""Whatever somebody feeds in, the answer is a result, or an error of rayfl's own that names the place."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from algorithms.registry import Experiment
from rayfl import treefile
from rayfl.cli import main
from rayfl.commits import CommitStore, Manifest
from rayfl.config.loading import load_config, to_yaml
from rayfl.data.assignment import ASSIGNMENT_SCHEMA, FilePartition
from rayfl.data.leaf import import_leaf
from rayfl.errors import ConfigError, DamageError, DataError, RayflError, RunError
from rayfl.lease import FILE, read_lease
from rayfl.storage import Storage
from rayfl.verification import verify

Result = TypeVar("Result")
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
THOROUGH = settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "all", "floco", "digits", "a:b", "os:system", "../x", "1e3", "nan", "4GiB", "\0"]),
    st.binary(max_size=4),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
BASE: dict[str, Any] = load_config(Experiment, "quickstart", []).model_dump(mode="json")


def paths(content: Any, before: tuple[str, ...] = ()) -> list[str]:
    """The dotted paths of all sections and values."""
    if not isinstance(content, dict):
        return [".".join(before)]
    inner = [path for key, value in content.items() for path in paths(value, (*before, key))]
    return inner if not before else [".".join(before), *inner]


PATHS = paths(BASE)


def tried(kind: type[RayflError], call: Callable[[], Result]) -> tuple[Result | None, str]:
    """What a call returns, or the message of its error; any other error passes."""
    try:
        return call(), ""
    except kind as error:
        return None, str(error)


def checked_override(path: str, value: Any) -> None:
    """The result is a configuration that survives YAML, or an error that names the path or its section."""
    config, message = tried(ConfigError, lambda: load_config(Experiment, "quickstart", {path: value}))
    named = [part for part in path.split(".") if part]
    assert config is not None or not named or any(part in message for part in [*named, "(top level)"]), message
    if config is not None:
        assert yaml.safe_load(to_yaml(config)) == config.model_dump(mode="json")


def checked_text(text: str) -> None:
    """The same for an override as it is typed."""
    config, message = tried(ConfigError, lambda: load_config(Experiment, "quickstart", [text]))
    assert config is not None or text.partition("=")[0].partition(".")[0] in message or repr(text) in message


OVERRIDES = st.tuples(
    st.sampled_from(PATHS)
    | st.text(max_size=12)
    | st.sampled_from(PATHS).flatmap(lambda path: st.text(max_size=5).map(lambda more: f"{path}.{more}")),
    VALUES,
)
TYPED = st.one_of(
    st.text(max_size=30),
    st.tuples(st.sampled_from(PATHS), st.text(max_size=20)).map("=".join),
)


@QUICK
@given(OVERRIDES)
def test_overrides_from_python(given_: tuple[str, Any]) -> None:
    checked_override(*given_)


@pytest.mark.slow
@THOROUGH
@given(OVERRIDES)
def test_overrides_from_python_thoroughly(given_: tuple[str, Any]) -> None:
    checked_override(*given_)


@QUICK
@given(TYPED)
def test_overrides_as_typed(text: str) -> None:
    checked_text(text)


@pytest.mark.slow
@THOROUGH
@given(TYPED)
def test_overrides_as_typed_thoroughly(text: str) -> None:
    checked_text(text)


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Cut, with changed bytes, with a part doubled, or something else altogether."""
    places = st.integers(0, max(len(content) - 1, 0))
    flipped = st.lists(st.tuples(places, st.integers(1, 255)), min_size=1, max_size=4)

    def flip(changes: list[tuple[int, int]]) -> bytes:
        data = bytearray(content)
        for place, mask in changes:
            data[place] ^= mask
        return bytes(data)

    return st.one_of(
        places.map(lambda end: content[:end]),
        flipped.map(flip),
        st.tuples(places, places).map(lambda cut: content[: cut[0]] + content[cut[1] :]),
        st.binary(max_size=40),
    )


def checked_file(folder: Path, content: bytes) -> None:
    """A configuration file is one, or the error names it."""
    file = folder / "config.yaml"
    file.write_bytes(content)
    config, message = tried(ConfigError, lambda: load_config(Experiment, file, []))
    # Only a method or module that the file names is called by that name.
    assert config is not None or str(file) in message or "algorithm" in message


CONFIGS = damaged(to_yaml(load_config(Experiment, "quickstart", [])).encode())


@QUICK
@given(CONFIGS)
def test_configuration_files(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    checked_file(tmp_path_factory.getbasetemp(), content)


@pytest.mark.slow
@THOROUGH
@given(CONFIGS)
def test_configuration_files_thoroughly(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    checked_file(tmp_path_factory.getbasetemp(), content)


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


def checked_commit(folder: Path, choice: int, replacement: bytes | None, data: st.DataObject) -> None:
    """With one file changed, the newest whole commit is found, or the error says what is wrong; verify always ends."""
    for path in folder.glob("**/*"):
        if path.is_file():
            path.unlink()
    store = a_run(folder)
    first = store.read_manifest("manifest-000001.json")
    files = sorted((folder / "commits").iterdir())
    path = files[choice % len(files)]
    before = path.read_bytes()
    path.write_bytes(data.draw(damaged(before)) if replacement is None else replacement)
    same = path.read_bytes() == before or as_json(path.read_bytes()) == as_json(before)
    report = verify(Storage(str(folder)))
    assert any(path.name in problem for problem in report.problems) or same or path.name == "newest.json"
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


USER = {"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[0.5] * 784] * 2, "y": [1, 61]}}}
LEAF_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
KINDS = st.sampled_from(["femnist", "shakespeare", "sent140", "synthetic", "reddit"])


@st.composite
def leaf_files(draw: st.DrawFn) -> bytes:
    """LEAF's JSON with one value replaced, or damaged as text."""
    if draw(st.booleans()):
        return draw(damaged(json.dumps({**USER, "user_data": {"a": {"x": [[0.5] * 9] * 2, "y": [1, 2]}}}).encode()))
    content = json.loads(json.dumps(USER))
    place = draw(st.sampled_from(["users", "num_samples", "user_data", "a", "x", "y", "x0", "y0", "x00", "all"]))
    value = draw(LEAF_VALUES)
    user = content["user_data"]["a"]
    if place == "all":
        content = value
    elif place in content:
        content[place] = value
    elif place == "a":
        content["user_data"]["a"] = value
    elif place in ("x", "y"):
        user[place] = value
    elif place == "x00":
        user["x"][0][0] = value
    else:
        user[place[0]][0] = value
    return json.dumps(content).encode()


def checked_leaf(folder: Path, kind: Any, content: bytes) -> None:
    """A Parquet file, or an error that names the place and nothing written."""
    destination = folder / "out.parquet"
    destination.unlink(missing_ok=True)
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True, exist_ok=True)
        (folder / split / "a.json").write_bytes(content if split == "train" else json.dumps(USER).encode())
    report, message = tried(DataError, lambda: import_leaf(kind, folder, destination))
    if report is None:
        assert str(folder) in message
        assert not destination.exists()
    else:
        assert pq.read_table(destination).num_rows > 0


@QUICK
@given(KINDS, leaf_files())
def test_leaf(tmp_path_factory: pytest.TempPathFactory, kind: str, content: bytes) -> None:
    checked_leaf(tmp_path_factory.getbasetemp() / "leaf", kind, content)


@pytest.mark.slow
@THOROUGH
@given(KINDS, leaf_files())
def test_leaf_thoroughly(tmp_path_factory: pytest.TempPathFactory, kind: str, content: bytes) -> None:
    checked_leaf(tmp_path_factory.getbasetemp() / "leaf-2", kind, content)


WORDS = st.sampled_from(
    ["show", "quickstart", "floco", "list", "models", "verify", "data", "stats", "--debug", "-h", "x"]
)
LINES = st.lists(WORDS | TYPED, max_size=4)


def checked_line(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command ends with a status that it documents, and says what is wrong in words."""
    with monkeypatch.context() as patch:
        patch.delenv("RAYFL_DEBUG", raising=False)
        patch.setattr(sys, "argv", ["rayfl", *(word for word in arguments if word != "--debug")])
        with pytest.raises(SystemExit) as stop:
            main()
    out, err = capsys.readouterr()
    assert stop.value.code in (0, 2), err
    assert "Traceback" not in out + err
    assert (out + err).strip()


@settings(QUICK, max_examples=15)
@given(arguments=LINES)
def test_command_lines(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked_line(arguments, monkeypatch, capsys)


@pytest.mark.slow
@settings(THOROUGH, max_examples=200)
@given(arguments=LINES)
def test_command_lines_thoroughly(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checked_line(arguments, monkeypatch, capsys)
