"""Damaged states of clients and servers: what `rayfl repair` gives up, and what is never made up."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import rayfl
from rayfl.cli.entry import app
from rayfl.config.loading import to_yaml
from rayfl.errors import DamageError, RunError
from rayfl.runs.damage import STATE
from rayfl.runs.finding import load_run
from rayfl.runs.repair import repair
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.lease import Lease
from tests.support.damage import STOPPED, flip, manifests
from tests.support.experiments import FEW, Interrupt, assert_same, each_method, outcome, small_experiment

pytestmark = pytest.mark.usefixtures("parts_of_one_commit")


def states_in_all(folder: Path) -> tuple[Path, list[int]]:
    """A file of states that all kept commits name, and whose states are in it after the newest."""
    older, newest = manifests(folder)
    shared = {file.name for file in older.states.values()} & {file.name for file in newest.states.values()}
    name = min(shared)
    return folder / "commits" / name, newest.clients_in({name})


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
    assert "is working here" in str(done.exception)
    for place in (tmp_path / "nowhere", tmp_path):
        assert isinstance(CliRunner().invoke(app, ["repair", str(place)]).exception, RunError)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.slow
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


@pytest.mark.parametrize("method", each_method(quick=FEW))
@pytest.mark.first_case
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
