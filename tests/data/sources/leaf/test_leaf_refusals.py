"""Sources of LEAF's that are refused, destinations that survive, and the real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayfl.data.sources.leaf import import_leaf
from rayfl.errors import DataError
from tests.support.leaf_sources import LEAF_ROOT, document, entry, needs_leaf, write_source


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_user_in_two_files_of_one_split_is_refused(tmp_path: Path, split: str) -> None:
    source = write_source(tmp_path / "leaf", document(bob=entry(1)), document(bob=entry(1)))
    (source / split / "z.json").write_text(json.dumps(document(bob=entry(2, first=99))))
    with pytest.raises(DataError, match=rf"{split}/z\.json, user 'bob': the user is also in .*\.json"):
        import_leaf("femnist", source, tmp_path / "f.parquet")


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_missing_or_empty_folder_is_refused(tmp_path: Path, split: str) -> None:
    source = write_source(tmp_path / "leaf", document(bob=entry(1)))
    for file in (source / split).iterdir():
        file.rename(file.with_suffix(".txt"))
    with pytest.raises(DataError, match=rf"{split} has no \*\.json file"):
        import_leaf("femnist", source, tmp_path / "f.parquet")
    (source / split).rename(source / "elsewhere")
    with pytest.raises(DataError, match=f"leaf has no folder '{split}'"):
        import_leaf("femnist", source, tmp_path / "f.parquet")


@pytest.mark.parametrize("train", [document(), document(nobody=entry())])
def test_a_source_without_train_samples_is_refused(tmp_path: Path, train: dict[str, Any]) -> None:
    source = write_source(tmp_path / "leaf", train, document(ann=entry(1)))
    with pytest.raises(DataError, match=r"leaf/train: no user has a sample"):
        import_leaf("femnist", source, tmp_path / "f.parquet")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path / "leaf", document(ann=entry(1)))
    (source / "train" / "z.json").mkdir()
    with pytest.raises(DataError, match=r"train/z\.json cannot be read"):
        import_leaf("femnist", source, tmp_path / "f.parquet")


def test_a_crash_while_writing_leaves_the_destination_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_source(tmp_path / "leaf", document(ann=entry(1), bob=entry(2, first=9)))
    destination = tmp_path / "out" / "f.parquet"
    import_leaf("femnist", source, destination)
    before = destination.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"f\.parquet cannot be written: .*No space left"):
        import_leaf("femnist", source, destination)
    assert destination.read_bytes() == before
    assert [path.name for path in destination.parent.iterdir()] == ["f.parquet"]


def test_a_folder_as_destination_is_refused(tmp_path: Path) -> None:
    source = write_source(tmp_path / "leaf", document(ann=entry(1)))
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match="out cannot be written"):
        import_leaf("femnist", source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["leaf", "out"]


@pytest.mark.slow
@needs_leaf
def test_real_femnist(tmp_path: Path) -> None:
    report = import_leaf("femnist", LEAF_ROOT / "femnist" / "data", tmp_path / "f.parquet")
    assert (report.clients, report.samples) == (51, {"train": 7236, "test": 829})
    # LEAF stores each writer's first image twice.
    assert report.warnings
    assert all("also occur in the train part" in warning for warning in report.warnings)
    file = sorted((LEAF_ROOT / "femnist" / "data" / "train").glob("*.json"))[0]
    content = json.loads(file.read_bytes())
    table = pq.read_table(report.destination)
    clients, splits = np.array(table.column("client")), np.array(table.column("split"))
    for user, data in content["user_data"].items():
        rows = table.take(np.flatnonzero((clients == user) & (splits == "train")))
        x = np.stack(rows.column("x").to_numpy(zero_copy_only=False))
        np.testing.assert_allclose(x / 255, data["x"], rtol=0, atol=1e-6)
        assert rows.column("y").to_pylist() == data["y"]


@needs_leaf
def test_real_shakespeare(tmp_path: Path) -> None:
    report = import_leaf("shakespeare", LEAF_ROOT / "shakespeare" / "data", tmp_path / "s.parquet")
    assert (report.clients, report.samples) == (44, {"train": 167_457, "test": 38_409})
    (warning,) = report.warnings
    assert "/test/" in warning
    assert "num_samples differs from the data of 44 of 44 users (41885 declared, 38409 present)" in warning
