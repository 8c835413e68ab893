"""The importer of LEAF's JSON: what it writes, what it warns of, what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfl.data.sources.leaf import ALPHABET, ImportReport, import_leaf, writing
from rayfl.errors import DataError
from tests.support.leaf_sources import document, entry, image, write_source

WINDOW = ALPHABET
BETWEEN_LEVELS = [0.5] * 784


def columns(report: ImportReport) -> dict[str, list[Any]]:
    content: dict[str, list[Any]] = pq.read_table(report.destination).to_pydict()
    return content


def test_round_trip_sorts_clients_and_keeps_the_order_of_samples(tmp_path: Path) -> None:
    first = document(zoe=entry(1, 2), bob=entry(3, first=50))
    source = write_source(tmp_path / "leaf", first, document(bob=entry(4, first=9), eve=entry(61, first=7)))
    (source / "train" / "c.json").write_text(json.dumps(document(ann=entry(0, 5, first=20))))
    report = import_leaf("femnist", source, tmp_path / "out" / "f.parquet")
    rows = columns(report)
    assert rows["client"] == ["ann", "ann", "bob", "bob", "eve", "zoe", "zoe"]
    assert rows["split"] == ["train", "train", "train", "test", "test", "train", "train"]
    assert rows["y"] == [0, 5, 3, 4, 61, 1, 2]
    for x, level in zip(rows["x"], [20, 21, 50, 9, 7, 0, 1], strict=True):
        assert x == [round(value * 255) for value in image(level)]
    assert report == ImportReport(4, {"train": 5, "test": 2}, (), tmp_path / "out" / "f.parquet")


def test_schema_and_header(tmp_path: Path) -> None:
    source = write_source(tmp_path / "leaf", document(ann=entry(1)))
    schema = pq.read_schema(import_leaf("femnist", source, tmp_path / "f.parquet").destination)
    assert [str(schema.field(name).type) for name in ("client", "split", "y")] == ["string", "string", "int16"]
    assert schema.field("x").type.list_size == 784
    assert str(schema.field("x").type.value_type) == "uint8"
    assert json.loads(schema.metadata[b"rayfl"]) == {
        "format": "natural",
        "version": 1,
        "kind": "femnist",
        "input": "image",
        "shape": [1, 28, 28],
        "num_classes": 62,
        "vocabulary": 0,
        "storage": "uint8",
    }


def test_pixels_between_the_grey_levels_make_the_whole_file_float32(tmp_path: Path) -> None:
    grey = document(zoe={"x": [BETWEEN_LEVELS], "y": [1]})
    source = write_source(tmp_path / "leaf", document(ann=entry(1, first=3)), grey)
    report = import_leaf("femnist", source, tmp_path / "f.parquet")
    table = pq.read_table(report.destination)
    assert str(table.schema.field("x").type.value_type) == "float"
    ann, zoe = (np.array(x, dtype=np.float32) for x in table.column("x").to_pylist())
    np.testing.assert_array_equal(ann, np.array(image(3), dtype=np.float32))
    np.testing.assert_array_equal(zoe, np.float32(0.5))


def test_rounded_decimals_are_still_grey_levels(tmp_path: Path) -> None:
    rounded: dict[str, list[Any]] = {"x": [[round(value, 6) for value in image(0)]], "y": [1]}
    report = import_leaf("femnist", write_source(tmp_path / "leaf", document(ann=rounded)), tmp_path / "f.parquet")
    assert columns(report)["x"][0] == [round(value * 255) for value in image(0)]


def test_shakespeare_is_tokenised_over_leafs_alphabet(tmp_path: Path) -> None:
    user = {"x": [WINDOW, WINDOW[::-1]], "y": ["\n", "}"]}
    report = import_leaf("shakespeare", write_source(tmp_path / "leaf", document(role=user)), tmp_path / "s.parquet")
    rows = columns(report)
    assert rows["x"] == [list(range(80)), list(range(79, -1, -1))]
    assert rows["y"] == [0, 79]
    assert len(set(ALPHABET)) == len(ALPHABET) == 80


@pytest.mark.parametrize("name", ["Дарья", "a/b", "é" * 300, " ", "..", "🙂", 'quote"\\', "\n"])
def test_any_name_is_kept(tmp_path: Path, name: str) -> None:
    source = write_source(tmp_path / "leaf", document(**{name: entry(1)}))
    assert columns(import_leaf("femnist", source, tmp_path / "f.parquet"))["client"] == [name]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text("abcdé", min_size=1, max_size=3), st.integers(0, 9), min_size=1, max_size=12))
def test_a_client_lies_in_one_row_group(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    monkeypatch.setattr(writing, "ROW_GROUP_TARGET", 6)
    folder = tmp_path_factory.mktemp("groups")
    users = {user: {"x": [WINDOW] * size, "y": ["a"] * size} for user, size in sizes.items()}
    source = write_source(folder / "leaf", document(**users, always={"x": [WINDOW], "y": ["b"]}))
    report = import_leaf("shakespeare", source, folder / "s.parquet")
    file = pq.ParquetFile(report.destination)
    groups = [
        file.read_row_group(group, columns=["client"]).column(0).to_pylist() for group in range(file.num_row_groups)
    ]
    members = [client for group in groups for client in sorted(set(group))]
    assert members == sorted(user for user, size in {**sizes, "always": 1}.items() if size)
    assert all(len(group) <= 6 or len(set(group)) == 1 for group in groups)
    assert report.samples["train"] == sum(sizes.values()) + 1


def test_num_samples_that_disagrees_is_one_warning_per_file(tmp_path: Path) -> None:
    wrong = document(ann=entry(1, 2), bob=entry(3, first=40), eve=entry(4, first=80))
    wrong["num_samples"] = [81, 1, 80]
    report = import_leaf("femnist", write_source(tmp_path / "leaf", wrong), tmp_path / "f.parquet")
    (warning,) = report.warnings
    assert re.search(r"train/a\.json: num_samples .* 2 of 3 users \(162 declared, 4 present\)", warning)
    assert report.samples["train"] == 4


def test_samples_in_train_and_test_are_reported_and_kept(tmp_path: Path) -> None:
    test = document(ann=entry(1, 9), bob=entry(1), eve=entry(7))
    source = write_source(tmp_path / "leaf", document(ann=entry(1, 2), eve=entry(8)), test)
    report = import_leaf("femnist", source, tmp_path / "f.parquet")
    # Another label (ann's second, eve's) or another user (bob) makes another sample.
    (warning,) = report.warnings
    assert "test/b.json: 1 samples also occur" in warning
    assert report.samples == {"train": 3, "test": 4}


def test_a_repeated_sample_is_found_where_only_one_part_is_made_of_grey_levels(tmp_path: Path) -> None:
    test: dict[str, list[Any]] = {"x": [image(0), BETWEEN_LEVELS], "y": [1, 1]}
    source = write_source(tmp_path / "leaf", document(ann=entry(1)), document(ann=test))
    assert "1 samples also occur" in import_leaf("femnist", source, tmp_path / "f.parquet").warnings[0]


def test_users_without_samples_are_reported_and_left_out(tmp_path: Path) -> None:
    source = write_source(tmp_path / "leaf", document(ann=entry(1), nobody=entry()))
    report = import_leaf("femnist", source, tmp_path / "f.parquet")
    assert report.clients == 1
    assert report.warnings == (f"{source / 'train' / 'a.json'}: 1 users have no sample here, the first is 'nobody'",)


def changed(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """A correct file of the users ann and bob, then changed."""
    content = document(ann=entry(1, 2), bob=entry(3, first=90))
    change(content)
    return content


def with_bob(**fields: Any) -> dict[str, Any]:
    return changed(lambda content: content["user_data"]["bob"].update(fields))


def with_pixel(value: object) -> dict[str, Any]:
    return with_bob(x=[[value, *image(0)[1:]]])


def renamed(name: str) -> dict[str, Any]:
    return document(ann=entry(1), **{name: entry(2)})


MALFORMED: dict[str, tuple[dict[str, Any] | str, str]] = {
    "x longer than y": (with_bob(y=[]), "'bob': 'x' has 1 samples and 'y' has 0"),
    "no y": (changed(lambda c: c["user_data"]["bob"].pop("y")), "'bob': the key 'x' or 'y' is missing"),
    "user is a list": (changed(lambda c: c["user_data"].update(bob=[])), "'bob': the key 'x' or 'y' is missing"),
    "x is no list": (with_bob(x="text"), "'bob': 'x' or 'y' is not a list"),
    "user twice in users": (changed(lambda c: c["users"].append("bob")), "'bob': the name occurs twice"),
    "user twice in user_data": (
        json.dumps(changed(lambda c: None)).replace('"ann": {', '"bob": {'),
        "the key 'bob' stands twice in one object",
    ),
    "user without data": (changed(lambda c: c["user_data"].pop("bob")), "'bob': the name is in 'users' but not"),
    "data without user": (changed(lambda c: c["users"].remove("bob")), "'bob': the name is in 'user_data' but not"),
    "label 62": (with_bob(y=[62]), r"'bob': y\[0\] is 62, not an integer from 0 to 61"),
    "label -1": (with_bob(y=[-1]), r"'bob': y\[0\] is -1"),
    "label 1.0": (with_bob(y=[1.0]), r"'bob': y\[0\] is 1.0"),
    "label true": (with_bob(y=[True]), r"'bob': y\[0\] is True"),
    "label NaN": (with_bob(y=[float("nan")]), r"'bob': y\[0\] is nan"),
    "label string": (with_bob(y=["3"]), r"'bob': y\[0\] is '3'"),
    "short image": (with_bob(x=[image(0)[1:]]), r"'bob': x\[0\] is not a list of 784 numbers"),
    "image of rows": (with_bob(x=[[[0.0] * 28] * 28]), r"'bob': x\[0\] is not a list of 784 numbers"),
    "image of strings": (with_bob(x=[["0"] * 784]), r"'bob': x\[0\] is not a list of 784 numbers"),
    "image is a text": (with_bob(x=["a" * 784]), r"'bob': x\[0\] is not a list of 784 numbers"),
    "pixel null": (with_pixel(None), r"'bob': x\[0\] is not a list of 784 numbers"),
    "pixel true": (with_pixel(True), r"'bob': x\[0\] is not a list of 784 numbers"),
    "pixel NaN": (with_pixel(float("nan")), r"'bob': pixel 0 of x\[0\] is nan, not finite"),
    "pixel infinite": (with_pixel(float("inf")), r"'bob': pixel 0 of x\[0\] is inf, not finite"),
    "pixel 1.01": (with_pixel(1.01), r"'bob': pixel 0 of x\[0\] is 1.01, outside \[0, 1\]"),
    "pixel -0.01": (with_pixel(-0.01), r"'bob': pixel 0 of x\[0\] is -0.01, outside \[0, 1\]"),
    "pixel 10^400": (with_pixel(10**400), r"'bob': a pixel is outside \[0, 1\]"),
    "empty name": (renamed(""), "user '': a name must not be empty"),
    "NUL in a name": (renamed("b\0b"), r"user 'b\\x00b': a name must not"),
    "half a surrogate pair": (renamed("b\ud83d"), r"user 'b\\ud83d': a name must not"),
    "truncated": (json.dumps(changed(lambda c: None))[:-40], "truncated or not JSON"),
    "not JSON": ("PAR1", "truncated or not JSON"),
    "empty file": ("", "truncated or not JSON"),
    "nested too deep": ("[" * 100_000, "truncated or not JSON"),
    "a list": ("[]", "does not hold a JSON object"),
    "no users": (changed(lambda c: c.pop("users")), "the key 'users' is missing"),
    "no num_samples": (changed(lambda c: c.pop("num_samples")), "the key 'num_samples' is missing"),
    "no user_data": (changed(lambda c: c.pop("user_data")), "the key 'user_data' is missing"),
    "users no list": (changed(lambda c: c.update(users="ann")), "'users' is not a list of names"),
    "users numbers": (changed(lambda c: c.update(users=[1, 2])), "'users' is not a list of names"),
    "num_samples short": (changed(lambda c: c["num_samples"].pop()), "'num_samples' is not a list of one"),
    "num_samples text": (changed(lambda c: c.update(num_samples=["2", "1"])), "'num_samples' is not a list of one"),
    "user_data no object": (changed(lambda c: c.update(user_data=[])), "'user_data' is not an object"),
}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(("content", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_files_are_refused_before_anything_is_written(
    tmp_path: Path, split: str, content: dict[str, Any] | str, message: str
) -> None:
    good = document(ann=entry(1))
    source = write_source(
        tmp_path / "leaf", content if split == "train" else good, content if split == "test" else good
    )
    destination = tmp_path / "f.parquet"
    destination.write_text("as it was")
    with pytest.raises(DataError, match=message) as caught:
        import_leaf("femnist", source, destination)
    assert str(source / split / ("a.json" if split == "train" else "b.json")) in str(caught.value)
    assert destination.read_text() == "as it was"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.parquet", "leaf"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": [WINDOW[1:]]}, r"x\[0\] is not a string of 80 characters"),
        ({"x": [[0.0] * 80]}, r"x\[0\] is not a string of 80 characters"),
        ({"x": [WINDOW[:-1] + "é"]}, r"x\[0\] has 'é', which is not in LEAF's alphabet"),
        ({"x": [WINDOW[:-1] + "\x7f"]}, r"x\[0\] has '\\x7f', which is not"),
        ({"x": [WINDOW[:-1] + "\ud83d"]}, r"x\[0\] has '\\ud83d', which is not"),
        ({"y": ["ab"]}, r"y\[0\] is not a string of 1 characters"),
        ({"y": [3]}, r"y\[0\] is not a string of 1 characters"),
        ({"y": ["{"]}, r"y\[0\] has '{', which is not"),
    ],
)
def test_malformed_text_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    content = document(ROMEO={"x": [WINDOW], "y": ["a"], **fields})
    source = write_source(tmp_path / "leaf", content)
    with pytest.raises(DataError, match=rf"a\.json, user 'ROMEO': {message}"):
        import_leaf("shakespeare", source, tmp_path / "s.parquet")
