"""Imported files have a record, so that ``rayfl data verify`` finds what is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rayfl.cli.entry import app
from rayfl.data.files.records import read_record, record_path
from rayfl.data.sources.leaf import LeafOptions, import_femnist_raw, import_leaf, import_shakespeare_raw
from rayfl.data.sources.preparation.inventory import inventory, verify
from rayfl.errors import DataError
from tests.data.sources.leaf.test_leaf_nist import nist
from tests.data.sources.leaf.test_leaf_plays import written
from tests.data.sources.leaf.test_leaf_words import tweets
from tests.support.leaf_sources import LEAF_ROOT, document, entry, needs_leaf, write_source


def imported(folder: Path) -> Path:
    source = write_source(folder / "leaf", document(ann=entry(1, 2), bob=entry(3, first=9)), document(ann=entry(5)))
    return import_leaf("femnist", source, folder / "femnist.parquet").destination


def test_a_fresh_import_is_good_and_says_where_it_is_from(tmp_path: Path) -> None:
    path = imported(tmp_path)
    assert verify(path) == ([], [])
    record = read_record(path)
    assert record is not None
    assert [file.path.name for file in record.files] == ["a.json", "b.json"]
    assert record.options == {"kind": "femnist"} and record.source == str(tmp_path / "leaf")
    assert inventory(tmp_path)[0].source == record.source


def test_a_changed_file_is_found(tmp_path: Path) -> None:
    path = imported(tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    wrong, _ = verify(path)
    assert any("has the sha256" in line or "cannot be read" in line or "not a readable" in line for line in wrong)


def test_other_content_under_the_same_record_is_found(tmp_path: Path) -> None:
    path = imported(tmp_path)
    record = record_path(path).read_bytes()
    other = write_source(tmp_path / "other", document(ann=entry(1, 7)))
    import_leaf("femnist", other, path)
    assert verify(path) == ([], [])
    record_path(path).write_bytes(record)
    wrong, _ = verify(path)
    assert len(wrong) == 2 and all("but its record says" in line for line in wrong)


def test_a_changed_or_missing_source_is_said(tmp_path: Path) -> None:
    path = imported(tmp_path)
    (tmp_path / "leaf" / "train" / "a.json").write_text("{}")
    assert "a.json has changed since" in verify(path)[0][0]
    (tmp_path / "leaf" / "train" / "a.json").unlink()
    wrong, unknown = verify(path)
    assert wrong == [] and "a.json, which it was made from, is gone" in unknown[0]


def test_options_and_their_files_are_on_record(tmp_path: Path) -> None:
    source = write_source(tmp_path / "leaf", document(ann=tweets("a b a")))
    words = tmp_path / "words.txt"
    words.write_text("<PAD>\n<UNK>\na\nb\n")
    options = LeafOptions(vocabulary_file=words, length=4)
    path = import_leaf("sent140", source, tmp_path / "s.parquet", options).destination
    record = read_record(path)
    assert record is not None
    assert record.options == {"kind": "sent140", "length": 4, "vocabulary_file": str(words)}
    assert [file.path.name for file in record.files] == ["a.json", "b.json", "words.txt"]
    assert verify(path) == ([], [])


def test_imports_from_the_sources_have_records_too(tmp_path: Path) -> None:
    images = import_femnist_raw(nist(tmp_path / "n", {"f0000_14": "3A3z"}), tmp_path / "f.parquet").destination
    (tmp_path / "plays.txt").write_text(written({"HE": "what say you " * 150, "SHE": "nothing at all " * 150}))
    plays = import_shakespeare_raw(tmp_path / "plays.txt", tmp_path / "s.parquet").destination
    for path, kind in ((images, "femnist"), (plays, "shakespeare")):
        record = read_record(path)
        assert record is not None
        assert record.options["kind"] == kind and record.options["train_fraction"] == 0.9
        assert verify(path) == ([], [])


def test_a_failed_import_leaves_no_record_of_another_file(tmp_path: Path) -> None:
    path = imported(tmp_path)
    broken = write_source(tmp_path / "broken", "no JSON")
    before = path.read_bytes(), record_path(path).read_bytes()
    with pytest.raises(DataError):
        import_leaf("femnist", broken, path)
    assert (path.read_bytes(), record_path(path).read_bytes()) == before


def test_the_commands_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "data"))
    source = write_source(tmp_path / "leaf", document(ann=entry(1, 2)))
    assert CliRunner().invoke(app, ["data", "import-leaf", "femnist", str(source)]).exit_code == 0
    text = CliRunner().invoke(app, ["data", "verify"]).output
    assert "good" in text and "no record" not in text and "does not name" not in text


@needs_leaf
def test_leaf_s_own_files(tmp_path: Path) -> None:
    report = import_leaf("femnist", LEAF_ROOT / "femnist" / "data", tmp_path / "femnist.parquet")
    record = read_record(report.destination)
    assert record is not None and len(record.files) == 20
    assert verify(report.destination) == ([], [])


def test_a_file_that_is_no_record_is_not_deleted(tmp_path: Path) -> None:
    source = write_source(tmp_path / "leaf", document(ann=entry(1, 2), bob=entry(3, first=9)))
    mine = tmp_path / "femnist.parquet.json"
    mine.write_text('{"notes": "mine"}')
    with pytest.raises(DataError, match=r"femnist\.parquet\.json is no record of rayfl's"):
        import_leaf("femnist", source, tmp_path / "femnist.parquet")
    assert mine.read_text() == '{"notes": "mine"}'
    assert not (tmp_path / "femnist.parquet").exists()
