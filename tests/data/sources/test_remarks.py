"""Users' own data that would train on something else than is meant are refused or warned of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import rayfl
from rayfl.cli.entry import app
from rayfl.config.added import ADDED
from rayfl.data.files.records import read_record, write_record
from rayfl.data.sources.base import Samples
from rayfl.data.sources.rows.parquet import ParquetSource
from rayfl.errors import DataError
from tests.support.own_files import (
    GAP,
    ONE_TWO,
    RANDOM,
    N,
    X,
    of_file,
    of_function,
    parts,
    remarks,
    table,
)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))


@pytest.mark.parametrize(
    ("labels", "found", "classes"),
    [
        (ONE_TWO, "the labels are 1, 2, which makes 3 classes, but 0 has no sample", 3),
        (GAP, "the labels are 0, 5, which makes 6 classes, but 1, 2, 3, 4 have no sample", 6),
    ],
)
def test_labels_with_gaps_are_warned_of_and_can_be_numbered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, labels: list[int], found: str, classes: int
) -> None:
    path = table(tmp_path / "f.parquet", y=labels)
    (remark,) = remarks(of_file(path), caplog)
    assert found in remark and "dataset.labels=renumbered" in remark
    assert parts(of_file(path)).dataset.spec.num_classes == classes
    # A second start reads the copy, and says it as well.
    assert remarks(of_file(path), caplog) == [remark]
    # Somebody who counts the classes means those without samples, unless it is the first alone: labels from 1.
    shorter = remark.removesuffix(f", or dataset.num_classes={classes}, if they are meant")
    assert remarks(of_file(path, num_classes=classes), caplog) == [shorter] * (labels == ONE_TWO)
    renumbered = of_file(path, labels="renumbered")
    assert remarks(renumbered, caplog) == []
    opened = ParquetSource(path=path, labels="renumbered").open()
    assert isinstance(opened, Samples)
    assert (opened.spec.num_classes, opened.y.tolist()) == (2, [0, 1] * 20)


def test_a_label_that_makes_a_billion_classes_is_named(tmp_path: Path) -> None:
    labels = [0, 1, 2, 10**9] * 10
    path = table(tmp_path / "f.parquet", y=labels)
    with pytest.raises(DataError, match=r"row 3 has the label 1000000000.*labels=renumbered.*num_classes=1000000001,"):
        ParquetSource(path=path).open()
    renumbered = ParquetSource(path=path, labels="renumbered").open()
    assert isinstance(renumbered, Samples) and renumbered.spec.num_classes == 4
    meant = ParquetSource(path=path, num_classes=10**9 + 1).open()
    assert isinstance(meant, Samples) and meant.remarks() == []  # found without a list of all classes


def test_what_is_said_before_a_run_has_its_folder_is_in_its_log(tmp_path: Path) -> None:
    path = table(tmp_path / "f.parquet", y=ONE_TWO)
    config = parts(of_file(path), cluster={"backend": "inline"}, storage_path=str(tmp_path), name="run").config
    rayfl.run(config.model_dump(mode="json") | {"train": {"rounds": 1, "clients_per_round": "all"}})
    said = "WARNING dataset: the labels are 1, 2, which makes 3 classes"
    log = (tmp_path / "run" / "rayfl.log").read_text()
    assert said in log.splitlines()[0]
    assert log.count(said) == 1


def test_clients_keep_their_labels_numbered_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = {"y": [-1, 7] * 20, "client": ["a"] * 20 + ["b"] * 20}
    path = table(tmp_path / "f.parquet", **columns)
    with pytest.raises(
        DataError,
        match=r"row 0 \(client 'a'\) is -1; labels are integers from 0, or any with dataset.labels=renumbered",
    ):
        parts(of_file(path), partition="natural").dataset  # noqa: B018
    dataset = parts(of_file(path, labels="renumbered"), partition="natural").dataset
    assert dataset.spec.num_classes == 2
    assert np.concatenate(list(dataset.labels(0).values())).tolist().count(0) == 10
    assert remarks(of_file(path, labels="renumbered"), caplog, partition="natural") == []


def test_parts_have_one_numbering(tmp_path: Path) -> None:
    split = ["train"] * 20 + ["test"] * 20
    path = table(tmp_path / "f.parquet", y=[3, 8] * 10 + [8, 9] * 10, split=split)
    for part, expected in (("train", {0, 1}), ("test", {1, 2})):
        opened = ParquetSource(path=path, labels="renumbered", part=part).open()
        assert isinstance(opened, Samples)
        assert set(opened.y.tolist()) == expected and opened.spec.num_classes == 3
    with pytest.raises(DataError, match="num_classes is 2, but there are 3 labels"):
        ParquetSource(path=path, labels="renumbered", num_classes=2).open()


def test_labels_of_a_function(caplog: pytest.LogCaptureFixture) -> None:
    (remark,) = remarks(of_function(X, np.array(ONE_TWO), 3), caplog)
    assert "the labels are 1, 2, which makes 3 classes, but 0 has no sample" in remark
    # A function says how many classes there are: some may well be without a sample.
    assert remarks(of_function(X, np.array(GAP), 6), caplog) == []
    with pytest.raises(DataError, match=r"y of sample \d+ is 2, but with num_classes=2 .*labels=renumbered"):
        parts(of_function(X, np.array(ONE_TWO), 2)).dataset  # noqa: B018
    dataset = parts(of_function(X, np.array(ONE_TWO), 2, labels="renumbered")).dataset
    assert set(np.concatenate([np.concatenate(list(dataset.labels(c).values())) for c in range(4)]).tolist()) == {0, 1}
    with pytest.raises(DataError, match="num_classes is 1, but there are 2 different labels"):
        parts(of_function(X, np.array(GAP), 1, labels="renumbered")).dataset  # noqa: B018


@pytest.mark.parametrize("labels", ["as_found", "renumbered"])
def test_a_single_class_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, labels: str) -> None:
    text = "all 40 samples have the label"
    (remark,) = remarks(of_file(table(tmp_path / "f.parquet", y=[2] * N), labels=labels), caplog)
    assert text in remark
    (remark,) = remarks(of_function(X, np.full(N, 2), 10, labels=labels), caplog)
    assert text in remark


PIXELS = RANDOM.integers(0, 256, (N, 1, 8, 8))
SCALED = PIXELS / 255
IMAGES = [
    (PIXELS, "whole numbers from 0 to 255, as pixels are"),
    (PIXELS * 0.9 + 0.05, "the images have values from 0.05 to 229.55"),
    (SCALED, None),
    ((SCALED - 0.3) / 0.1, None),
]


@pytest.mark.parametrize(("images", "found"), IMAGES)
def test_images_that_are_not_scaled_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, images: np.ndarray, found: str | None
) -> None:
    y = np.arange(N) % 4
    path = table(tmp_path / "f.parquet", x=images.reshape(N, -1).tolist())
    for source in (of_function(images.astype(float), y, 4), of_file(path, shape=[1, 8, 8])):
        said = remarks(source, caplog)
        assert len(said) == (found is not None)
        assert all(str(found) in remark for remark in said)
        assert remarks(source, caplog, transform={"normalize": "dataset"}) == []
    assert remarks(of_function(images.astype(np.uint8), y, 4), caplog) == []


def test_images_with_channels_last_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    y, last = np.arange(N) % 4, RANDOM.integers(0, 256, (N, 8, 12, 3)).astype(np.uint8)
    path = table(tmp_path / "f.parquet", x=pa.array(last.reshape(N, -1).tolist(), pa.list_(pa.uint8())))
    for source in (of_function(last, y, 4), of_file(path, shape=[8, 12, 3]), of_function(last / 255, y, 4)):
        (remark,) = remarks(source, caplog)
        assert (
            "(8, 12, 3) means 8 channels of 12 x 3 pixels" in remark and "transpose the images to (3, 8, 12)" in remark
        )
    assert remarks(of_function(last.transpose(0, 3, 1, 2), y, 4), caplog) == []
    assert remarks(of_function(RANDOM.normal(size=(N, 12, 90, 1)), y, 4), caplog) == []  # series of twelve sensors


def test_numbers_that_a_word_makes_categories_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ages, sizes = [str(n) for n in range(N)], [f"1,{n:03}" for n in range(N)]
    columns = {"x": None, "age": ["?", *ages[1:]], "size": sizes, "zip": ages, "dose": ["1", "2", "none", "4"] * 10}
    path = table(tmp_path / "f.parquet", **columns)
    names = ["age", "size", "zip", "dose"]
    first, second, third = remarks(of_file(path, x=names), caplog)
    assert "column 'age' is text, since '?' is no number, and its 40 values are categories" in first
    assert "column 'size' is text, since '1,000' is no number" in second
    assert "column 'zip' has 40 different texts in 40 rows" in third and "leave it out of dataset.x" in third
    # Labels are looked at as those of other files are.
    gaps = table(tmp_path / "g.parquet", x=None, age=RANDOM.normal(size=N), sex=["f", "m"] * 20, y=ONE_TWO)
    (remark,) = remarks(of_file(gaps, x=["age", "sex"]), caplog)
    assert "the labels are 1, 2, which makes 3 classes, but 0 has no sample" in remark


def test_lists_of_integers_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = RANDOM.integers(0, 5000, (N, 20))
    (remark,) = remarks(of_file(table(tmp_path / "f.parquet", x=tokens.tolist())), caplog)
    assert "lists of integers from " in remark and "not as tokens; store them as float32" in remark
    assert remarks(of_file(table(tmp_path / "g.parquet", x=tokens.astype(float).tolist())), caplog) == []
    flat = PIXELS.reshape(N, -1)
    (remark,) = remarks(of_file(table(tmp_path / "h.parquet", x=flat.tolist())), caplog)
    assert "as pixels are" in remark
    column = pa.array(flat.tolist(), pa.list_(pa.uint8()))
    assert remarks(of_file(table(tmp_path / "i.parquet", x=column)), caplog) == []


def columns_of(x: np.ndarray) -> dict[str, Any]:
    return {"x": None} | {f"x{n}": column for n, column in enumerate(x.T)}


_OF_A_TYPE = r"has the type \w+, but .* \(x0, x1, x2, x4, x5\)"


@pytest.mark.parametrize(
    ("odd", "why"), [(["a"] * N, _OF_A_TYPE), ([True] * N, _OF_A_TYPE), ([None] * N, "has no value in any row")]
)
def test_a_column_among_the_inputs_is_never_dropped(tmp_path: Path, odd: list[Any], why: str) -> None:
    columns = columns_of(RANDOM.normal(size=(N, 6)))
    whole = table(tmp_path / "whole.parquet", **columns)
    assert ParquetSource(path=whole).open().spec.shape == (6,)  # type: ignore[union-attr]
    path = table(tmp_path / "f.parquet", **columns | {"x3": odd})
    with pytest.raises(DataError, match=f"column 'x3' {why}"):
        ParquetSource(path=path).open()
    meant = ParquetSource(path=path, x=("x5", "x0", "x1")).open()
    assert isinstance(meant, Samples)
    np.testing.assert_array_equal(meant.x, np.column_stack([columns[n] for n in ("x5", "x0", "x1")]).astype(np.float32))
    named = ParquetSource(path=path, x=("x0", "x3"))
    if odd[0] is None:
        with pytest.raises(DataError, match="column 'x3' has no value in any row"):
            named.open()
    else:  # a category, since it is named
        assert named.open().spec.shape == (1 + len(set(odd)),)  # type: ignore[union-attr]
    with pytest.raises(DataError, match="has no column 'x9'"):
        ParquetSource(path=path, x=("x0", "x9")).open()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"label": [0] * N}, "columns y and label; say which is meant with dataset.y"),
        ({"image": [0.0] * N}, "columns x and image; say which is meant with dataset.x"),
        ({"x": [0.0] * N, "x1": [1.0] * N}, "a column 'x' of single numbers and also x1; name the inputs"),
        ({"x0": [0.0] * N, "x1": [1.0] * N}, "a column 'x' of inputs and also x0, x1; name the inputs"),
    ],
)
def test_columns_that_may_be_meant_are_not_chosen_among(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ParquetSource(path=table(tmp_path / "f.parquet", **columns)).open()


def test_columns_of_numbers_that_are_left_out_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = columns_of(RANDOM.normal(size=(N, 3))) | {"age": [30.0] * N, "note": ["text"] * N}
    path = table(tmp_path / "f.parquet", **columns)
    (remark,) = remarks(of_file(path), caplog)
    assert "columns whose names begin with x, and age is left out: name the inputs with dataset.x=" in remark
    for meant in (["x0", "x1", "x2"], ["x0", "x1", "x2", "age"]):
        assert remarks(of_file(path, x=meant), caplog) == []
    kept = ParquetSource(path=path, target="values", standardize="global").open()
    assert any("age is left out" in remark.text for remark in kept.remarks())
    # Beside lists and images there may be anything.
    assert remarks(of_file(table(tmp_path / "lists.parquet", age=[30.0] * N)), caplog) == []


def test_copies_that_an_older_release_made_are_looked_at(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = table(tmp_path / "f.parquet", y=ONE_TWO)
    (remark,) = remarks(of_file(path), caplog)
    copy = ParquetSource(path=path).prepared_path
    content, record = copy.read_bytes(), read_record(copy)
    assert record is not None
    older = {key: value for key, value in record.options.items() if key not in ("remarks", "labels")}
    write_record(copy, record.content, record.source, record.files, older)
    assert remarks(of_file(path), caplog) == [remark]
    again = read_record(copy)
    assert again is not None
    assert (copy.read_bytes(), again.content) == (content, record.content)
    # One that lacks a column of text is not used any more.
    odd = table(tmp_path / "odd.parquet", **columns_of(RANDOM.normal(size=(N, 3))) | {"x1": ["text"] * N})
    copy.rename(ParquetSource(path=odd).prepared_path)
    write_record(ParquetSource(path=odd).prepared_path, record.content, record.source, record.files, older)
    with pytest.raises(DataError, match="column 'x1' has the type"):
        ParquetSource(path=odd).open()


def test_the_option_counts_where_it_changes_something(tmp_path: Path) -> None:
    assert ADDED["dataset.labels"] == "as_found"
    path = table(tmp_path / "f.parquet")
    plain, same, other = (
        parts(of_file(path, **o)).config for o in ({}, {"labels": "as_found"}, {"labels": "renumbered"})
    )
    assert plain.fingerprint() == same.fingerprint() != other.fingerprint()
    before = ParquetSource(path=path)
    assert before.prepared_path != ParquetSource(path=path, labels="renumbered").prepared_path
    assert '"labels"' not in str(before.prepared_path)


def test_data_stats_say_it_too(tmp_path: Path) -> None:
    path = table(tmp_path / "f.parquet", y=GAP)
    arguments = ["data", "stats", "quickstart", f"dataset={{name: parquet, path: {path}}}"]
    done = CliRunner().invoke(app, [*arguments, "partition={name: iid, num_clients: 4}"])
    assert done.exit_code == 0, done.output
    assert "note: the labels are 0, 5, which makes 6 classes" in done.output


def test_test_rows_that_clients_would_train_on_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = table(tmp_path / "f.parquet", split=["train"] * 30 + ["test"] * 10)
    (remark,) = remarks(of_file(path), caplog)
    assert "10 of 40 samples are of the split test" in remark
    assert "dataset.part=train" in remark and "dataset.split=none" in remark
    # Also of a configuration that was written down with all its defaults.
    assert remarks(parts(of_file(path)).config.dataset.model_dump(mode="json"), caplog) == [remark]
    for options in ({"part": "train"}, {"split": "none"}):
        assert remarks(of_file(path, **options), caplog) == []
