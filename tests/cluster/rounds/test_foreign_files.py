"""What is not rayfl's stays as it is: files, folders and what links lead to."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rayfl
from actors.hosting.memory import Spill
from algorithms.registry import Experiment
from cluster.sweep.folder import write_record
from rayfl.cli.entry import app
from rayfl.errors import RunError
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.lease import FILE
from rayfl.storage.local_files import open_to_append
from rayfl.sweeps.space import parse_space
from rayfl.sweeps.trials import plan_sweep
from tests.runs.test_reliability import commit
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment

PRECIOUS = {"thesis.tex": b"\\end{document}", "manifest-final.json": b"{}", "states-of-mind.parquet": b"x"}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(small_experiment(folder, "run", "scaffold", backend="inline"), callbacks=[Interrupt(2)])
    return folder / "run"


@pytest.fixture
def experiment(tmp_path: Path) -> dict[str, Any]:
    return small_experiment(tmp_path, "run", "scaffold", backend="inline")


def precious(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, content in PRECIOUS.items():
        (folder / name).write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("place", ["commits", "", "results"])
def test_a_folder_that_is_no_runs_is_refused_and_stays_as_it_is(
    place: str, experiment: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    if place:
        precious(tmp_path / "run" / place)
    else:
        (tmp_path / "run" / "notes.txt").write_text("mine")
    before = contents(tmp_path / "run")
    with pytest.raises(RunError, match=rf"run is not a folder of rayfl's: .* but {place or 'notes.txt'}"):
        rayfl.run(experiment)
    assert contents(tmp_path / "run") == before


def test_commits_without_their_configuration_are_refused(
    interrupted: Path, experiment: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    (folder / "config.yaml").unlink()
    before = contents(folder)
    with pytest.raises(RunError, match=r"restore its config\.yaml"):
        rayfl.run(experiment)
    assert contents(folder) == before


@pytest.mark.parametrize("begun", [True, False])
def test_commits_behind_a_link_are_refused_and_what_it_leads_to_stays(
    begun: bool, interrupted: Path, experiment: dict[str, Any], tmp_path: Path
) -> None:
    elsewhere, folder = precious(tmp_path / "elsewhere"), tmp_path / "run"
    if begun:
        shutil.copytree(interrupted, folder)
        shutil.rmtree(folder / "commits")
    folder.mkdir(exist_ok=True)
    (folder / "commits").symlink_to(elsewhere)
    with pytest.raises(RunError, match=rf"run/commits is a link to {elsewhere}: rayfl deletes"):
        rayfl.run(experiment)
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == PRECIOUS
    assert not (folder / FILE).exists()
    if begun:
        assert any(
            "commits in" in problem and "is a link" in problem for problem in verify(Storage(str(folder))).problems
        )


def test_a_link_that_is_put_there_while_a_run_goes_on_is_not_followed_either(
    experiment: dict[str, Any], tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"

    class Swap(rayfl.Callback):
        def on_commit(self, rounds_completed: int) -> None:
            if rounds_completed == 2:
                shutil.copytree(tmp_path / "run" / "commits", elsewhere)
                shutil.rmtree(tmp_path / "run" / "commits")
                (tmp_path / "run" / "commits").symlink_to(elsewhere)

    with pytest.raises(RunError, match=r"cannot delete .*run/commits/manifest-000001\.json"):
        rayfl.run(experiment, callbacks=[Swap()])
    assert (elsewhere / "manifest-000001.json").exists()


def test_foreign_files_among_commits_stay_and_are_named(
    interrupted: Path, experiment: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    for name, content in PRECIOUS.items():
        (folder / "commits" / name).write_bytes(content)
    (folder / "commits" / "states-000009-0000-abcdef01.safetensors").write_bytes(b"left by a crash")
    rayfl.run(experiment)
    found = {path.name: path for path in (folder / "commits").iterdir()}
    assert {name: found[name].read_bytes() for name in PRECIOUS} == PRECIOUS
    assert "states-000009-0000-abcdef01.safetensors" not in found
    assert "files that rayfl leaves alone: manifest-final.json, states-of-mind.parquet, thesis.tex" in caplog.text
    report = verify(Storage(str(folder)))
    assert report.problems == []
    assert any("not rayfl's" in note and "thesis.tex" in note for note in report.notes)


def test_a_file_of_a_dropped_commit_goes_whatever_its_name(tmp_path: Path) -> None:
    store = CommitStore(Storage(str(tmp_path)))
    old = commit(store, 1, 1.0)
    renamed = old.server.model_copy(update={"name": "the-first-server"})
    (tmp_path / "commits" / old.server.name).rename(tmp_path / "commits" / "the-first-server")
    store.write_manifest(old.model_copy(update={"server": renamed}))
    commit(store, 2, 2.0)
    assert store.foreign() == []
    store.collect(1)
    assert not (tmp_path / "commits" / "the-first-server").exists()


def test_the_log_does_not_follow_a_link(
    experiment: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rayfl.run(experiment | {"train": experiment["train"] | {"rounds": 1}, "name": "calm"})
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(experiment, callbacks=[Interrupt(2)])
    (tmp_path / "run" / "rayfl.log").unlink()
    (tmp_path / "run" / "rayfl.log").symlink_to(mine)
    assert rayfl.run(experiment).rounds_completed == 4
    assert mine.read_text() == "mine"
    assert "rayfl.log: it is a link; this run has no log" in caplog.text


def test_files_that_are_appended_to_are_never_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "result.json").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic link"):
        open_to_append(tmp_path / "result.json")
    with open_to_append(tmp_path / "other") as file:
        file.write("a")
    with open_to_append(tmp_path / "other") as file:
        file.write("b")
    assert (tmp_path / "other").read_text() == "ab"
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("folder", ["link", "link/inner", "real/link"])
def test_nothing_is_deleted_through_a_link(folder: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    (tmp_path / "run" / "real").mkdir(parents=True)
    for place in ("link", "real/link"):
        (tmp_path / "run" / place).symlink_to(tmp_path / "elsewhere")
    for place in ("", "inner"):
        (tmp_path / "elsewhere" / place / "file").write_text("x")
    with pytest.raises(RunError, match=f"cannot delete {tmp_path}/run/{folder}/file"):
        Storage(str(tmp_path / "run")).delete(f"{folder}/file")
    assert (tmp_path / "elsewhere" / "file").exists()
    assert (tmp_path / "elsewhere" / "inner" / "file").exists()
    (tmp_path / "run" / "real" / "file").symlink_to(tmp_path / "elsewhere" / "file")
    Storage(str(tmp_path / "run")).delete("real/file")  # the link itself
    assert not (tmp_path / "run" / "real" / "file").is_symlink()
    assert (tmp_path / "elsewhere" / "file").exists()


def test_what_killed_drivers_left_is_removed_at_the_next_start(
    interrupted: Path, experiment: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    token = "0123456789abcdef" * 2
    left = [
        ".calibration.parquet.0a1b2c3d.tmp",
        ".timings.jsonl.0a1b2c3d.tmp",
        f".probe-{token}",
        "commits/.server-000003-0a1b2c3d.safetensors.44444444.tmp",
        "commits/.newest.json.44444444.tmp",
    ]
    of_others = [".lease.json.0a1b2c3d.tmp", f".lease-after-{token}"]
    mine = [".thesis.tex.0a1b2c3d.tmp", ".calibration.parquet.backup.tmp", "commits/.hidden.0a1b2c3d.tmp"]
    for name in (*left, *of_others, *mine):
        (folder / name).write_bytes(b"half")
    calm = small_experiment(tmp_path, "calm", "scaffold", backend="inline")
    rayfl.run(calm)
    rayfl.run(experiment)
    assert_same(outcome(tmp_path / "calm"), outcome(folder))
    assert [name for name in left if (folder / name).exists()] == []
    # A driver that waits for the lease may be writing these just now.
    assert [name for name in (*of_others, *mine) if not (folder / name).exists()] == []
    for name in of_others:
        os.utime(folder / name, (time.time() - 999, time.time() - 999))
    rayfl.run(experiment)
    assert [name for name in of_others if (folder / name).exists()] == []
    assert all((folder / name).exists() for name in mine)


def test_a_start_that_was_cut_short_begins_again(experiment: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("partition.parquet", ".config.yaml.0a1b2c3d.tmp", "..lease.json.0a1b2c3d.new.0a1b2c3d.tmp"):
        (folder / name).write_bytes(b"half")
    assert rayfl.run(experiment).rounds_completed == 4
    assert not (folder / ".config.yaml.0a1b2c3d.tmp").exists()


def test_spilled_states_of_dead_processes_go_and_nothing_else(tmp_path: Path) -> None:
    namespace = "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid")))
    dead = f"rayfl-spill-{os.uname().nodename}-{namespace}-999999999"
    states = [tmp_path / f"{dead}-abcdefgh" / "3.safetensors", tmp_path / f"{dead}-ijklmnop" / "4.safetensors"]
    mine = [
        tmp_path / f"{dead}-abcdefgh" / "notes.txt",
        tmp_path / f"{dead}-of-mine" / "5.safetensors",
        tmp_path / "elsewhere" / "6.safetensors",
    ]
    for path in (*states, *mine):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    (tmp_path / f"{dead}-12345678").symlink_to(tmp_path / "elsewhere")
    spill = Spill(1, str(tmp_path))
    kept = [spill.store({"w": torch.zeros(4)}) for _ in range(3)]
    assert spill.spilled
    del kept
    spill.close()
    assert [path for path in states if path.exists()] == []
    assert [path for path in mine if not path.exists()] == []
    assert not states[1].parent.exists()


def test_a_sweep_into_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "groups.parquet").write_text("mine")
    arguments = ["sweep", "quickstart", "seed=0,1", f"storage_path={tmp_path}", "name=mine", "cluster.backend=inline"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert "is not a folder of rayfl's: it has no sweep.yaml, but groups.parquet" in str(done.exception)
    assert (tmp_path / "mine" / "groups.parquet").read_text() == "mine"


def test_a_sweep_removes_what_a_killed_one_was_writing(tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "sweep", "fedavg", backend="inline")
    sweep = plan_sweep(Experiment, content, parse_space(["seed=0,1"]), None, 0)
    old, new, mine = ".trials.parquet.0a1b2c3d.tmp", ".groups.parquet.0a1b2c3d.tmp", ".mine.0a1b2c3d.tmp"
    for name in (old, new, mine):
        sweep.folder.write(name, b"half")
    for name in (old, mine):
        os.utime(tmp_path / "sweep" / name, (time.time() - 9999, time.time() - 9999))
    write_record(sweep)
    assert {*sweep.folder.names()} == {"sweep.yaml", new, mine}
