"""Rows of tables that no kept commit has whole: taken from the table beside the commits, or lost and on record."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import rayfl
from rayfl.runs.finding import load_run
from rayfl.runs.repair import mend_tables
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.tables import from_parquet, to_parquet
from tests.support.damage import STOPPED, flip, manifests
from tests.support.experiments import assert_same, outcome
from tests.support.toys import assert_equal

pytestmark = pytest.mark.usefixtures("parts_of_one_commit")

TABLES = ("clients", "rounds", "skipped", "calibration")


def damaged_part(folder: Path, table: str) -> Path:
    """A part that all kept commits name, damaged."""
    first = [manifest.tables[table][0] for manifest in manifests(folder)]
    assert len(set(first)) == 1
    return flip(folder / "commits" / first[0].name)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.two_cases
def test_rows_that_the_table_beside_the_commits_has_are_not_lost(
    table: str, folder: Path, calm: Path, experiment: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    name = damaged_part(folder, table).name
    rayfl.run(experiment)
    assert_same(outcome(calm), outcome(folder))
    assert name in caplog.text
    empty = table in ("skipped", "calibration")  # all clients are evaluated after the second round
    assert ("it had no rows" if empty else f"its rows were taken from {table}.parquet") in caplog.text
    assert not (folder / "damage.parquet").exists()
    assert verify(Storage(str(folder))).problems == []


def test_an_empty_part_needs_no_table_to_be_taken_from(folder: Path, calm: Path, experiment: dict[str, Any]) -> None:
    damaged_part(folder, "skipped")
    (folder / "skipped.parquet").unlink()
    rayfl.run(experiment)
    assert_same(outcome(calm), outcome(folder))


@pytest.mark.parametrize("table", ["clients", "rounds"])
def test_rows_that_are_lost_are_named_and_the_run_goes_on(
    table: str, folder: Path, calm: Path, experiment: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    part = damaged_part(folder, table)
    (folder / f"{table}.parquet").write_bytes(b"neither")
    result = rayfl.run(experiment)
    assert result.rounds_completed == 4
    assert part.name in caplog.text
    assert f"lost are the rows of {table} of round 1" in caplog.text
    before, after = outcome(calm), outcome(folder)
    assert_equal(before.server, after.server)
    assert_equal(before.states, after.states)
    whole = getattr(before, table)
    assert getattr(after, table).equals(whole.filter(pc.greater(whole["round"], 1)))
    for other in {*TABLES} - {table}:
        assert getattr(after, other).equals(getattr(before, other))
    row = {"round": STOPPED, "lost": table, "client": None, "first_round": 1, "last_round": 1, "file": part.name}
    assert [{**row, "reason": found["reason"]} for found in result.damage.to_pylist()] == result.damage.to_pylist()
    assert "SHA-256" in result.damage["reason"][0].as_py()
    assert pq.read_table(folder / "damage.parquet").equals(result.damage)
    report = verify(Storage(str(folder)))
    assert report.problems == []
    said = f"Damage to files has cost {table}.parquet rows of round 1: it is incomplete."
    assert said in report.notes
    assert said in load_run(str(folder), {}).notes


def test_rows_are_found_whichever_rayfl_has_written_their_part(folder: Path, experiment: dict[str, Any]) -> None:
    store, storage = CommitStore(Storage(str(folder))), Storage(str(folder))
    lost = {"clients", "skipped"}
    for manifest in manifests(folder):
        tables = dict(manifest.tables)
        for name in lost:  # parts of an older rayfl, whose metadata was another
            first, *others = tables[name]
            rows = from_parquet(store.read(first)).replace_schema_metadata({b"rayfl.older": b"1"})
            old = store.write_table(1, name, to_parquet(rows))
            tables[name] = (old, *others)
        rounds = from_parquet(store.read(tables["rounds"][0])).replace_schema_metadata({b"rayfl.older": b"1"})
        tables["rounds"] = (store.write_table(1, "rounds", to_parquet(rounds)), *tables["rounds"][1:])
        store.replace_manifest(manifest.model_copy(update={"tables": tables}))
        for name in lost:
            (folder / "commits" / tables[name][0].name).unlink()
    said = mend_tables(store, storage)
    assert len(said) == 2 and all("lost" not in line for line in said)


def test_all_rows_of_all_tables_may_be_lost(folder: Path, calm: Path, experiment: dict[str, Any]) -> None:
    for manifest in manifests(folder):
        for name in manifest.table_files():
            (folder / "commits" / name).unlink(missing_ok=True)
    for table in TABLES:
        (folder / f"{table}.parquet").unlink()
    result = rayfl.run(experiment)
    before, after = outcome(calm), outcome(folder)
    assert_equal(before.server, after.server)
    assert_equal(before.states, after.states)
    for table in TABLES:
        whole = getattr(before, table)
        assert getattr(after, table).equals(whole.filter(pc.greater(whole["round"], STOPPED)))
    lost = [(row["lost"], row["first_round"], row["last_round"]) for row in result.damage.to_pylist()]
    assert ("clients", 1, 1) in lost and ("clients", 2, 2) in lost and ("clients", 3, 3) in lost
    assert verify(Storage(str(folder))).problems == []


def test_rows_that_are_lost_after_the_last_round_are_put_on_record_too(
    calm: Path, tmp_path: Path, experiment: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(calm, tmp_path / "run"))
    damaged_part(folder, "clients")
    (folder / "clients.parquet").unlink()
    for _ in range(2):
        result = rayfl.run(experiment)
        assert [row["lost"] for row in result.damage.to_pylist()] == ["clients"]
    assert verify(Storage(str(folder))).problems == []


def test_the_record_of_what_was_lost_may_be_lost_and_the_run_does_not_look_undisturbed(
    folder: Path, experiment: dict[str, Any]
) -> None:
    damaged_part(folder, "clients")
    (folder / "clients.parquet").unlink()
    rayfl.run(experiment)
    damaged_part(folder, "damage")
    (folder / "damage.parquet").unlink()
    assert [row["lost"] for row in rayfl.run(experiment).damage.to_pylist()] == ["damage"]


def test_a_table_that_is_damaged_while_a_run_goes_on_does_not_end_it(
    calm: Path,
    tmp_path: Path,
    experiment: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Damage(rayfl.Callback):
        def on_commit(self, rounds_completed: int) -> None:
            if rounds_completed == 2:
                manifest = manifests(tmp_path / "run")[-1]
                (tmp_path / "run" / "commits" / manifest.tables["clients"][0].name).unlink()
                (tmp_path / "run" / "clients.parquet").unlink()

    monkeypatch.setattr("cluster.rounds.recorder.PUBLISH_EVERY_S", 0)
    monkeypatch.setattr("cluster.rounds.recorder.PUBLISH_SPACING", 0)
    result = rayfl.run(experiment, callbacks=[Damage()])
    assert result.rounds_completed == 4
    assert caplog.text.count("The run goes on; its tables are written at its end") == 1, "nor is it said every round"
    assert [(row["lost"], row["last_round"]) for row in result.damage.to_pylist()] == [("clients", 1)]
    assert_equal(outcome(calm).server, outcome(tmp_path / "run").server)
    assert verify(Storage(str(tmp_path / "run"))).problems == []
