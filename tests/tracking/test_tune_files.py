from __future__ import annotations

import csv
from pathlib import Path

import pytest

import rayfl
from rayfl.errors import RunError
from rayfl.storage.files import Storage
from rayfl.tracking.tune_files import CSV_FILE, JSON_FILE, TuneFiles, read_results
from tests.support.experiments import small_experiment
from tests.tracking.test_tracking import info, tables

NAME = "top1/test, all clients, received/global"


def rounds(folder: Path) -> list[int]:
    found = [line["training_iteration"] for line in read_results(Storage(str(folder)))]
    with (folder / CSV_FILE).open() as file:
        assert [int(row["training_iteration"]) for row in csv.DictReader(file)] == found
    return found


def evaluate(files: TuneFiles, *numbers: int) -> None:
    for number in numbers:
        files.on_evaluation(tables(number).rounds.to_pylist())


def test_files_have_what_is_committed(tmp_path: Path) -> None:
    files = TuneFiles(Storage(str(tmp_path)))
    files.on_start(info())
    evaluate(files, 1, 2, 3)
    assert not (tmp_path / JSON_FILE).exists()
    files.on_commit(2)
    assert rounds(tmp_path) == [1, 2]
    line = read_results(Storage(str(tmp_path)))[0]
    assert line[NAME] == pytest.approx(0.3)
    assert line["trial_id"] == "run"


def test_a_rewind_leaves_no_line_too_many(tmp_path: Path) -> None:
    files = TuneFiles(Storage(str(tmp_path)))
    files.on_start(info())
    evaluate(files, 1, 2, 3)
    files.on_commit(3)
    files.on_failure("host 0 died", 1)
    assert rounds(tmp_path) == [1]
    evaluate(files, 2)
    files.on_commit(2)
    assert rounds(tmp_path) == [1, 2]
    again = TuneFiles(Storage(str(tmp_path)))
    again.on_start(info(1))
    evaluate(again, 4)
    again.on_commit(4)
    assert rounds(tmp_path) == [1, 4]


def test_damage_is_said_and_begun_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / JSON_FILE).write_text("{\n")
    files = TuneFiles(Storage(str(tmp_path)))
    files.on_start(info(1))
    assert "result.json in" in caplog.text
    evaluate(files, 2)
    files.on_commit(2)
    assert rounds(tmp_path) == [2]


def test_new_rounds_are_appended_and_new_columns_are_not(tmp_path: Path) -> None:
    files = TuneFiles(Storage(str(tmp_path)))
    files.on_start(info())
    evaluate(files, 1)
    files.on_commit(1)
    first = (tmp_path / JSON_FILE).stat().st_ino
    evaluate(files, 2, 3)
    files.on_commit(3)
    assert rounds(tmp_path) == [1, 2, 3]
    assert (tmp_path / JSON_FILE).stat().st_ino == first
    files.on_evaluation([{**row, "model": "another"} for row in tables(4).rounds.to_pylist()])
    files.on_commit(4)
    assert rounds(tmp_path) == [1, 2, 3, 4]
    assert (tmp_path / JSON_FILE).stat().st_ino != first
    assert any("another" in name for name in read_results(Storage(str(tmp_path)))[-1])


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    files = TuneFiles(Storage(str(tmp_path)))
    files.on_start(info())
    evaluate(files, 1, 2)
    files.on_commit(2)
    for name in (JSON_FILE, CSV_FILE):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-20])
    again = TuneFiles(Storage(str(tmp_path)))
    again.on_start(info(2))
    evaluate(again, 3)
    again.on_commit(3)
    assert rounds(tmp_path) == [1, 3]


def test_a_full_disk_is_reported(tmp_path: Path) -> None:
    files = TuneFiles(Storage(str(tmp_path)))
    files.on_start(info())
    evaluate(files, 1)
    files.on_commit(1)
    (tmp_path / JSON_FILE).unlink()
    (tmp_path / JSON_FILE).mkdir()
    evaluate(files, 2)
    with pytest.raises(RunError, match=r"cannot write .*result\.json"):
        files.on_commit(2)


def test_a_run_writes_them(tmp_path: Path) -> None:
    result = rayfl.run(small_experiment(tmp_path, "run", "fedavg", backend="inline"))
    found = read_results(Storage(result.path))
    assert found[-1]["training_iteration"] == result.rounds_completed
    assert set(rounds(Path(result.path))) == set(result.rounds["round"].to_pylist())
