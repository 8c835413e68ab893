"""LEAF files: a Parquet file, or an error that names the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfl.data.sources.leaf import import_leaf
from rayfl.errors import DataError
from tests.support.fuzz_inputs import QUICK, THOROUGH, damaged, tried

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
