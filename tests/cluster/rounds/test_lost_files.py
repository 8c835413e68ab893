"""Damage that no kept commit is without: rows of tables and clients' states are lost, put on record, and no more."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import rayfl
import rayfl.storage.tables
from rayfl.cli.entry import app
from rayfl.config.loading import to_yaml
from rayfl.errors import DamageError, RunError
from rayfl.runs.damage import STATE
from rayfl.runs.finding import load_run
from rayfl.runs.repair import mend_tables, repair
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.lease import Lease
from rayfl.storage.manifest import Manifest
from rayfl.storage.tables import from_parquet, to_parquet
from tests.cluster.rounds.test_resume import Interrupt
from tests.support.experiments import assert_same, each_method, outcome, small_experiment
from tests.support.toys import assert_equal

TABLES = ("clients", "rounds", "skipped", "calibration")
STOPPED = 3
"""After this one of four rounds."""


@pytest.fixture(scope="module", autouse=True)
def parts_of_one_commit() -> Iterator[None]:
    """Every commit's rows are a part of their own, so that kept commits share the older ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rayfl.storage.tables, "_LARGE_BYTES", 1)
        yield


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(small_experiment(folder, "run", "scaffold", backend="inline"), callbacks=[Interrupt(STOPPED)])
    return folder / "run"


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


@pytest.fixture
def experiment(tmp_path: Path) -> dict[str, Any]:
    return small_experiment(tmp_path, "run", "scaffold", backend="inline")


def manifests(folder: Path) -> list[Manifest]:
    store = CommitStore(Storage(str(folder)))
    return [store.read_manifest(name) for name in store.manifests()]


def flip(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return path


def damaged_part(folder: Path, table: str) -> Path:
    """A part that all kept commits name, damaged."""
    first = [manifest.tables[table][0] for manifest in manifests(folder)]
    assert len(set(first)) == 1
    return flip(folder / "commits" / first[0].name)


def states_in_all(folder: Path) -> tuple[Path, list[int]]:
    """A file of states that all kept commits name, and whose states are in it after the newest."""
    older, newest = manifests(folder)
    shared = {file.name for file in older.states.values()} & {file.name for file in newest.states.values()}
    name = min(shared)
    return folder / "commits" / name, newest.clients_in({name})


@pytest.mark.parametrize("table", TABLES)
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

    monkeypatch.setattr("cluster.rounds.recorder._PUBLISH_EVERY_S", 0)
    monkeypatch.setattr("cluster.rounds.recorder._PUBLISH_SHARE", 0)
    result = rayfl.run(experiment, callbacks=[Damage()])
    assert result.rounds_completed == 4
    assert "The run goes on; its tables are written at its end" in caplog.text
    assert [(row["lost"], row["last_round"]) for row in result.damage.to_pylist()] == [("clients", 1)]
    assert_equal(outcome(calm).server, outcome(tmp_path / "run").server)
    assert verify(Storage(str(tmp_path / "run"))).problems == []


def test_damaged_states_of_all_commits_are_refused_with_the_clients_and_the_way_out(
    folder: Path, experiment: dict[str, Any]
) -> None:
    path, clients = states_in_all(folder)
    flip(path)
    said = f"lost are the states of client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}"
    with pytest.raises(DamageError, match=rf"(?s){path.name}.*After round 3 .*{said}\. .*`rayfl repair {folder}`"):
        rayfl.run(experiment)


def test_a_repaired_run_goes_on_and_says_so(folder: Path, calm: Path, experiment: dict[str, Any]) -> None:
    path, clients = states_in_all(folder)
    path.unlink()
    done = CliRunner().invoke(app, ["repair", str(folder)])
    assert done.exit_code == 0, done.output
    assert "from what a client never sampled has" in done.output
    newest = manifests(folder)[-1]
    assert not set(clients) & set(newest.states)
    assert verify(Storage(str(folder))).problems == []
    result = rayfl.run(experiment)
    assert result.rounds_completed == 4
    rows = [row for row in result.damage.to_pylist() if row["lost"] == STATE]
    assert [row["client"] for row in rows] == clients
    assert {(row["round"], row["first_round"]) for row in rows} == {(STOPPED, 1)}
    assert {row["file"] for row in rows} == {path.name}
    notes = load_run(str(folder), {}).notes
    assert any("The run was repaired after round 3" in note and "undisturbed" in note for note in notes)
    assert verify(Storage(str(folder))).notes[-1] in notes
    # Rows of before the repair are those of the undisturbed run.
    before = pq.read_table(calm / "clients.parquet")
    after = pq.read_table(folder / "clients.parquet")
    early = [table.filter(pc.less_equal(table["round"], STOPPED)) for table in (before, after)]
    assert early[0].equals(early[1])
    (folder.parent / "run.yaml").write_text(to_yaml(result.config))
    again = CliRunner().invoke(app, ["run", str(folder.parent / "run.yaml")])
    assert again.exit_code == 0
    assert "The run was repaired after round 3" in " ".join(again.output.split())


def test_a_client_has_its_older_state_where_a_commit_names_one(folder: Path) -> None:
    older, newest = manifests(folder)
    changed = {file.name for file in newest.states.values()} - {file.name for file in older.states.values()}
    (lost,) = changed
    _, shared = states_in_all(folder)
    flip(folder / "commits" / older.server.name)  # else that commit would be used
    flip(folder / "commits" / lost)
    clients = newest.clients_in({lost})
    store, storage = CommitStore(Storage(str(folder))), Storage(str(folder))
    said = repair(store, storage)
    found = store.latest(thoroughly=True)
    assert found is not None and found.rounds_completed == STOPPED
    assert {c: found.states.get(c) for c in clients} == {c: older.states.get(c) for c in clients}
    assert {c: found.states[c] for c in shared} == {c: newest.states[c] for c in shared}
    assert store.manifests() == ["manifest-000003.json"]
    assert any("manifest-000002.json is given up" in line for line in said)
    assert verify(storage).problems == []


def test_no_commit_is_given_up_for_one_that_was_not_looked_at(folder: Path, experiment: dict[str, Any]) -> None:
    older, newest = manifests(folder)
    part = folder / "commits" / newest.tables["clients"][-1].name
    part.write_bytes(part.read_bytes()[:-1])  # a glance shows it
    flip(folder / "commits" / older.server.name)  # and this not
    result = rayfl.run(experiment)
    assert result.rounds_completed == 4
    assert verify(Storage(str(folder))).problems == []


def test_a_whole_older_commit_needs_no_repair(folder: Path, calm: Path, experiment: dict[str, Any]) -> None:
    flip(folder / "commits" / max(file.name for file in manifests(folder)[-1].states.values()))
    done = CliRunner().invoke(app, ["repair", str(folder)])
    assert done.exit_code == 0
    assert "nothing needs repair" in done.output
    rayfl.run(experiment)
    assert_same(outcome(calm), outcome(folder))


def test_a_servers_model_is_never_made_up(folder: Path, experiment: dict[str, Any]) -> None:
    for manifest in manifests(folder):
        flip(folder / "commits" / manifest.server.name)
    before = {path.name: path.read_bytes() for path in (folder / "commits").iterdir()}
    with pytest.raises(DamageError, match="has no whole commit"):
        rayfl.run(experiment)
    with pytest.raises(DamageError, match="no commit with a whole server's model, and none is made up"):
        repair(CommitStore(Storage(str(folder))), Storage(str(folder)))
    assert {path.name: path.read_bytes() for path in (folder / "commits").iterdir()} == before


def test_a_run_at_work_is_not_repaired(folder: Path, tmp_path: Path) -> None:
    with Lease(Storage(str(folder)), 90):
        done = CliRunner().invoke(app, ["repair", str(folder)])
    assert isinstance(done.exception, RunError)
    assert "is working on this run" in str(done.exception)
    for place in (tmp_path / "nowhere", tmp_path):
        assert isinstance(CliRunner().invoke(app, ["repair", str(place)]).exception, RunError)
    assert not (tmp_path / "nowhere").exists()


def test_one_damaged_file_never_loses_a_run(stopped: Path, calm: Path, tmp_path: Path) -> None:
    """Every file of the commits, and every one that a commit is made from: what it costs to lose it."""
    needed = {path for path in stopped.rglob("*") if path.parent.name == "commits"}
    costs: dict[str, set[str]] = {"nothing": set(), "states": set()}
    for path in sorted(needed):
        place = Path(shutil.copytree(stopped, tmp_path / path.name / "run"))
        (place / path.relative_to(stopped)).unlink()
        config = small_experiment(place.parent, "run", "scaffold", backend="inline")
        try:
            rayfl.run(config)
        except DamageError:
            assert repair(CommitStore(Storage(str(place))), Storage(str(place)))
            rayfl.run(config)
            costs["states"].add(path.name)
        else:
            assert_same(outcome(calm), outcome(place))
            costs["nothing"].add(path.name)
        assert verify(Storage(str(place))).problems == []
    assert all(name.startswith("states-") for name in costs["states"])
    assert len(costs["nothing"]) > 2 * len(costs["states"]) > 0


@pytest.mark.parametrize("method", each_method())
def test_every_method_goes_on_after_all_states_were_lost(method: str, tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "run", method, backend="inline")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(config, callbacks=[Interrupt(STOPPED)])
    states = {file.name for manifest in manifests(tmp_path / "run") for file in manifest.states.values()}
    for name in states:
        (tmp_path / "run" / "commits" / name).unlink()
    storage = Storage(str(tmp_path / "run"))
    said = repair(CommitStore(storage), storage)
    assert bool(said) == bool(states)
    result = rayfl.run(config)
    assert result.rounds_completed == 4
    assert bool(result.damage.num_rows) == bool(states)
