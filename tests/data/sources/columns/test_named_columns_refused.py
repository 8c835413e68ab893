"""What is wrong in tables with named columns is refused by file, column, client and fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest

from rayfl.data.images.transform import Normalization, TransformConfig
from rayfl.data.sources.rows.parquet import ParquetSource
from rayfl.errors import ConfigError, DataError
from tests.support.tables import INPUTS, ROWS, opened, own_section, written


def changed(column: str, row: int, value: Any) -> dict[str, list[Any]]:
    return {column: [value if i == row else old for i, old in enumerate(ROWS[column])]}


@pytest.mark.parametrize(
    ("target", "changes", "options", "words"),
    [
        (
            "class",
            {},
            {"x": ["age", "weight"], "y": "outcome"},
            r"dataset.x: .*rows.parquet has no column 'weight', only .*; name one of them$",
        ),
        ("class", {}, {"x": "age", "y": "dead"}, r"dataset.y: .*rows.parquet has no column 'dead', only age, bmi"),
        ("class", {}, {"x": "age", "y": "outcme"}, r"no column 'outcme' \(did you mean 'outcome'\?\), only"),
        ("class", {}, {"x": "note", "y": "outcome"}, r"column 'note' is text: set dataset.tokenizer=words"),
        (
            "class",
            {"bmi": pa.nulls(12)},
            {"x": ["age", "bmi", "sex"], "y": "outcome", "missing": "mean"},
            r"column 'bmi' has no value in any row: fill it",
        ),
        ("class", {}, {"x": "age", "y": ["cough", "fever"]}, r"names 2 columns .*set task=multilabel"),
        ("class", {}, {"x": "age", "y": "days"}, r"column 'days' has the type double; .*set task=regression"),
        ("class", {}, {"x": "age", "y": "sex"}, r"column 'sex' has the type string; labels are integers"),
        ("class", {}, {"x": "age", "y": "age"}, r"column 'age' of .* is to be learned .*name it only once"),
        ("class", changed("outcome", 5, None), {"x": "age", "y": "outcome"}, r"row 5 \(client 'B'\) is null.*fill it"),
        (
            "class",
            {"outcome": pa.array([0.0, 1.0, 1.0, 0.0, None, *[1.0] * 7])},  # what pandas writes of integers with a gap
            {"x": "age", "y": "outcome"},
            r"rows.parquet: column 'outcome', row 4 \(client 'B'\) is null.*fill it",
        ),
        (
            "labels",
            changed("cough", 9, 2),
            {"x": "age", "y": ["cough", "fever"]},
            r"'cough', row 9 \(client 'C'\) is 2.*mend the row, or set task=regression",
        ),
        (
            "labels",
            {},
            {"x": "age", "y": ["cough", "sex"]},
            r"column 'sex' has the type string; labels are columns of 0.*store 0 and 1 .*set task=classification",
        ),
        ("tokens", {}, {"x": "age"}, r"rows.parquet: next tokens are learned of texts: set dataset.tokenizer"),
        (
            "values",
            changed("days", 6, float("inf")),
            {"x": "age", "y": "days"},
            r"row 6 \(client 'B'\) is inf;.*finite",
        ),
        ("values", changed("days", 2, None), {"x": "age", "y": "days"}, r"'days', row 2 \(client 'A'\) is null"),
        ("values", {}, {"x": "age", "y": "note"}, r"'note' has the type string; .*store numbers .*set task=class"),
        ("values", {}, {"x": "age", "y": "days", "num_classes": 3}, r"dataset.num_classes is for classes"),
        ("values", {}, {"x": "age", "y": "days", "labels": "renumbered"}, r"dataset.labels=renumbered is for classes"),
        ("class", {}, {"x": INPUTS, "y": "outcome", "shape": [3]}, r"shape is \[3\], but .* a table's .*age, bmi, sex"),
        (
            "tokens",
            {},
            {"x": "note", "y": "outcome", "tokenizer": "words"},
            r"dataset.y is outcome, but what is learned are the texts' next tokens",
        ),
        ("class", {}, {"x": INPUTS, "y": "outcome", "tokenizer": "words"}, r"names 3 columns, but a text is one"),
        (
            "class",
            {},
            {"x": "age", "y": "outcome", "tokenizer": "words"},
            r"'age' has the type double, but .*tokenizer",
        ),
        (
            "class",
            {},
            {"x": "note", "y": "outcome", "tokenizer": "no/such"},
            r"dataset.tokenizer: no/such does not exist",
        ),
        (
            "class",
            {},
            {"x": "note", "y": "outcome", "kind": "tokens"},
            r"column 'note' has the type string; tokens are",
        ),
        (
            "class",
            changed("note", 4, None),
            {"x": "note", "y": "outcome", "tokenizer": "words"},
            r"row 4 \(client 'B'\)",
        ),
        (
            "class",
            changed("age", 3, float("inf")),
            {"x": INPUTS, "y": "outcome"},
            r"'age', row 3 \(client 'A'\) .*finite",
        ),
    ],
)
def test_what_is_wrong_is_said_by_file_column_client_and_fix(
    tmp_path: Path, target: str, changes: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words) as found:
        opened(own_section(tmp_path, changes=changes, **options), target)
    assert "rows.parquet" in str(found.value) or "dataset." in str(found.value)


@pytest.mark.parametrize("order", [1, -1])
def test_columns_that_hold_other_things_in_other_files_are_refused(tmp_path: Path, order: int) -> None:
    paths = (written(tmp_path, "csv"), tmp_path / "more.csv")
    paths[1].write_text(paths[0].read_text().replace("40,", "unknown,"))
    section = {"paths": paths[::order], "root": tmp_path, "x": ["age", "bmi"], "y": "outcome", "client": "hospital"}
    words = r"more.csv: column 'age' holds text, but that of .*rows.csv numbers: store one kind in all files"
    words = words if order > 0 else r"rows.csv: column 'age' holds numbers, but that of .*more.csv text"
    with pytest.raises(DataError, match=words):
        opened({**section, "standardize": "global"})


@pytest.mark.parametrize("normalize", ["dataset", Normalization(mean=(0.5,), std=(2.0,))])
def test_what_would_spoil_categories_and_gaps_is_refused(tmp_path: Path, normalize: Any) -> None:
    with pytest.raises(ConfigError, match=r"transform.normalize: .* table's columns.*set dataset.standardize=global"):
        opened(own_section(tmp_path, x=INPUTS, y="outcome"), transform=TransformConfig(normalize=normalize))
    opened(own_section(tmp_path, x=["age", "bmi"], y="outcome"), transform=TransformConfig(normalize=normalize))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"length": 3}, "length is for texts"),
        ({"padding": 3}, "padding is for lists of tokens"),
        ({"tokenizer": "words", "kind": "tokens"}, "leave one out"),
        ({"tokenizer": "words", "standardize": "global"}, "standardize is for numbers"),
        ({"kind": "tokens", "shape": (1, 3)}, "shape is for numbers"),
        ({"labels": "renumbered", "target": "values"}, "labels=renumbered is for classes"),
    ],
)
def test_options_that_say_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParquetSource(path=Path("rows.parquet"), **options)
