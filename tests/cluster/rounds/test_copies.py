"""With two copies of every file, one flipped bit, one lost file and one lost disk cost nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

import rayfl
from algorithms.registry import Experiment
from rayfl.cli.entry import app
from rayfl.errors import DamageError, RunError
from rayfl.runs.folder import open_run
from rayfl.runs.verification import verify
from rayfl.storage.commit_files import CommitFiles
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.support.damage import flip, manifests
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment

BESIDE = ("config.yaml", "partition.parquet")


def experiment(folder: Path, **storage: Any) -> dict[str, Any]:
    config = small_experiment(folder, "run", "scaffold", backend="inline")
    return config | {"storage": {"copies": 2, **storage}}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(experiment(folder), callbacks=[Interrupt(3)])
    return folder / "run"


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def all_files(folder: Path) -> dict[str, bytes]:
    files = [*(folder / "commits").iterdir(), *(folder / name for name in BESIDE)]
    return {path.name: path.read_bytes() for path in files}


def test_every_file_is_there_twice_and_shares_no_bits(folder: Path) -> None:
    assert all_files(folder) == all_files(folder / "copy")
    for path in (folder / "commits").iterdir():
        other = folder / "copy" / "commits" / path.name
        assert not other.is_symlink()
        assert other.stat().st_nlink == path.stat().st_nlink == 1
    assert verify(Storage(str(folder))).problems == []


@pytest.mark.slow
@pytest.mark.parametrize("place", ["", "copy"])
def test_any_file_may_be_damaged_in_either_folder(place: str, folder: Path, calm: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(folder, tmp_path / "whole"))
    for number, name in enumerate(sorted(all_files(whole))):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        path = folder / place / ("" if name in BESIDE else "commits") / name
        # Nothing tells that an older commit was there whose manifest is gone.
        needed = place or name not in ("manifest-000002.json", "newest.json")
        if name == "config.yaml" or (number % 2 and needed):
            path.unlink()
        else:
            flip(path)
        assert any(name in problem for problem in verify(Storage(str(folder))).problems), name
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(experiment(tmp_path), callbacks=[Interrupt(0), _AtStart()])
        assert all_files(folder) == all_files(folder / "copy"), name
        assert verify(Storage(str(folder))).problems == [], name
    rayfl.run(experiment(tmp_path))
    assert_same(outcome(calm), outcome(folder))


class _AtStart(rayfl.Callback):
    def on_start(self, run: Any) -> None:
        raise KeyboardInterrupt


def test_what_is_restored_is_a_line_of_the_log_and_no_warning(
    folder: Path, calm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "config.yaml").unlink()
    for path in (folder / "commits").iterdir():
        if path.name.startswith(("server", "states", "clients")):
            flip(path)
    newest = manifests(folder)[-1]
    rayfl.run(experiment(tmp_path))
    assert_same(outcome(calm), outcome(folder))
    log = (folder / "rayfl.log").read_text()
    for name in ("config.yaml", newest.server.name):
        assert log.count(f"{name} in {folder} was missing or damaged and is restored from {folder}/copy") == 1
    assert "WARNING" not in log
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"a: [", b"- a"])
@pytest.mark.two_cases
def test_a_configuration_that_is_none_any_more_is_restored(content: bytes, folder: Path, tmp_path: Path) -> None:
    before = (folder / "config.yaml").read_bytes()
    (folder / "config.yaml").write_bytes(content)
    assert rayfl.run(experiment(tmp_path)).rounds_completed == 4
    assert (folder / "config.yaml").read_bytes() == before
    assert verify(Storage(str(folder))).problems == []


@pytest.mark.parametrize("lost", ["commits", "everything"])
def test_a_lost_disk_costs_nothing(lost: str, calm: Path, tmp_path: Path) -> None:
    config = experiment(tmp_path / "first", copies_path=str(tmp_path / "second"))
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(config, callbacks=[Interrupt(3)])
    assert all_files(tmp_path / "first" / "run") == all_files(tmp_path / "second" / "run")
    shutil.rmtree(tmp_path / "first" / "run" / ("commits" if lost == "commits" else ""))
    assert rayfl.run(config).rounds_completed == 4
    assert_same(outcome(calm), outcome(tmp_path / "first" / "run"))
    shutil.rmtree(tmp_path / "second")
    rayfl.run(config)
    assert all_files(tmp_path / "first" / "run") == all_files(tmp_path / "second" / "run")


def test_the_copies_alone_can_be_continued(folder: Path, calm: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    shutil.copytree(folder / "copy", tmp_path / "other" / "run")
    rayfl.run(small_experiment(tmp_path / "other", "run", "scaffold", backend="inline"))
    assert_same(outcome(calm), outcome(tmp_path / "other" / "run"))


def test_copies_may_begin_later_and_pause(calm: Path, tmp_path: Path) -> None:
    alone = small_experiment(tmp_path, "run", "scaffold", backend="inline")
    for config, after in ((alone, 1), (experiment(tmp_path), 2), (alone, 3)):
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(config, callbacks=[Interrupt(after)])
        assert (tmp_path / "run" / "copy").exists() == (after > 1)
    rayfl.run(experiment(tmp_path))
    assert_same(outcome(calm), outcome(tmp_path / "run"))
    assert all_files(tmp_path / "run") == all_files(tmp_path / "run" / "copy")


@pytest.mark.slow
def test_copies_that_begin_later_are_known_to_whoever_reads_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rayfl.run(small_experiment(tmp_path, "run", "scaffold", backend="inline"))
    rayfl.run(experiment(tmp_path))
    assert verify(Storage(str(folder))).problems == []
    server = manifests(folder)[-1].server.name
    flip(folder / "copy" / "commits" / server)
    assert any(server in problem for problem in verify(Storage(str(folder))).problems)
    rayfl.run(str(folder))
    flip(folder / "commits" / server)
    assert rayfl.run(str(folder)).rounds_completed == 4
    assert verify(Storage(str(folder))).problems == []


@pytest.mark.slow
def test_copies_that_paused_while_the_run_was_given_more_rounds_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rayfl.run(experiment(tmp_path))
    rayfl.run(str(folder), **{"train.rounds": 5, "storage.copies": 1})
    assert verify(Storage(str(folder))).problems == []
    rayfl.run(str(folder), **{"train.rounds": 6, "storage.copies": 2})
    assert verify(Storage(str(folder))).problems == []
    assert all_files(folder) == all_files(folder / "copy")


def test_a_file_that_is_damaged_in_both_folders_is_damaged(folder: Path, tmp_path: Path) -> None:
    for manifest in manifests(folder):
        for place in ("", "copy"):
            flip(folder / place / "commits" / manifest.server.name)
    with pytest.raises(DamageError, match="has no whole commit"):
        rayfl.run(experiment(tmp_path))


def test_readers_use_the_copies_and_write_nothing(folder: Path) -> None:
    newest = manifests(folder)[-1]
    flip(folder / "commits" / newest.server.name)
    (folder / "commits" / next(iter(newest.states.values())).name).unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    store = open_run(str(folder), Experiment).store
    assert store.latest(thoroughly=True) == newest
    store.read_server(newest)
    for file in newest.states.values():
        store.read_states(file)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_file_that_cannot_be_read_is_taken_from_the_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = manifests(folder)[-1]
    alone, copied = (CommitStore(Storage(str(folder)), copy) for copy in (None, Storage(str(folder / "copy"))))
    for name in ("read", "digest"):
        real = getattr(Storage, name)

        def failing(self: Storage, path: str, real: Any = real) -> Any:
            if self.uri == str(folder) and newest.server.name in path:
                raise RunError(f"cannot read {path}: Input/output error")
            return real(self, path)

        monkeypatch.setattr(Storage, name, failing)
    for broken in (lambda: alone.usable(thoroughly=True), lambda: alone.read_server(newest)):
        with pytest.raises(RunError, match="Input/output error"):
            broken()
    assert copied.latest(thoroughly=True) == newest
    copied.read_server(newest)


def test_what_drops_out_of_commits_drops_out_of_the_copies(tmp_path: Path) -> None:
    files = CommitFiles(Storage(str(tmp_path / "run")), Storage(str(tmp_path / "copy")))
    files.write("states-000001-0000-abcdef01.safetensors", b"x")
    (tmp_path / "copy" / "commits" / "mine.txt").write_text("mine")
    CommitStore(Storage(str(tmp_path / "run")), Storage(str(tmp_path / "copy"))).collect(1)
    assert [path.name for path in (tmp_path / "copy" / "commits").iterdir()] == ["mine.txt"]
    assert list((tmp_path / "run" / "commits").iterdir()) == []


def test_copies_of_another_run_or_in_the_runs_own_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    config = experiment(tmp_path, copies_path=str(tmp_path))
    with pytest.raises(RunError, match="is the run's own folder: copies in it would share its bits"):
        rayfl.run(config)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(RunError, match="is the run's own folder"):
        rayfl.run(experiment(tmp_path, copies_path=str(tmp_path / "link")))
    (tmp_path / "mine" / "run").mkdir(parents=True)
    (tmp_path / "mine" / "run" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"mine/run is not a folder of rayfl's: .* but notes\.txt"):
        rayfl.run(experiment(tmp_path, copies_path=str(tmp_path / "mine")))
    shutil.copytree(folder / "copy", tmp_path / "third" / "run")
    text = (tmp_path / "third" / "run" / "config.yaml").read_text()
    (tmp_path / "third" / "run" / "config.yaml").write_text(text.replace("storage_path: ", "storage_path: /elsewhere"))
    with pytest.raises(RunError, match=r"third/run/config\.yaml is not a copy of"):
        rayfl.run(experiment(tmp_path, copies_path=str(tmp_path / "third")))
    other = experiment(tmp_path / "new", copies_path=str(tmp_path / "third"))
    other["train"] = other["train"] | {"lr": 0.2}
    with pytest.raises(RunError, match=r"third/run holds another run: train\.lr"):
        rayfl.run(other)
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(folder / "copy")
    (folder / "copy").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"run/copy is a link to"):
        rayfl.run(experiment(tmp_path))


def test_a_place_for_copies_needs_copies_and_has_no_keys(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="copies_path needs copies=2"):
        Experiment.model_validate(experiment(tmp_path, copies=1, copies_path="/elsewhere"))
    with pytest.raises(ValidationError, match="keys do not belong here"):
        Experiment.model_validate(experiment(tmp_path, copies_path="s3://key:secret@bucket/copies"))


def test_repair_uses_the_copies(folder: Path) -> None:
    for manifest in manifests(folder):
        for file in (manifest.server, *manifest.states.values()):
            (folder / "commits" / file.name).unlink(missing_ok=True)
    done = CliRunner().invoke(app, ["repair", str(folder)])
    assert done.exit_code == 0
    assert "is restored from" in done.output
    assert verify(Storage(str(folder))).problems == []
    assert not (folder / "damage.parquet").exists()
