"""A damaged commit is named, and the run goes on from the one before to the bits of an undamaged one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import rayfl
from rayfl.errors import DamageError, RunError
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import Manifest
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment

KINDS: dict[str, Callable[[Manifest], str]] = {
    "manifest": lambda manifest: f"manifest-{manifest.rounds_completed:06d}.json",
    "server": lambda manifest: manifest.server.name,
    "states": lambda manifest: max(file.name for file in manifest.states.values()),
    "table": lambda manifest: manifest.tables["clients"][-1].name,
}


def newest(folder: Path) -> Manifest:
    manifest = CommitStore(Storage(str(folder))).latest()
    assert manifest is not None
    return manifest


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(small_experiment(folder, "run", "scaffold", backend="inline"), callbacks=[Interrupt(3)])
    return folder / "run"


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "missing"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.two_cases
def test_the_previous_whole_commit_is_used_with_a_warning(
    kind: str, damage: str, calm: Path, interrupted: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    before = newest(folder)
    assert before.rounds_completed == 3
    path = folder / "commits" / KINDS[kind](before)
    content = path.read_bytes()
    path.unlink()
    if damage == "truncated":
        path.write_bytes(content[:-3])
    elif damage == "flipped bit":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    result = rayfl.run(small_experiment(tmp_path, "run", "scaffold", backend="inline"))
    assert result.rounds_completed == 4
    assert path.name in caplog.text
    assert "The commit of round 2 is whole and used instead" in caplog.text
    assert_same(outcome(calm), outcome(folder))
    assert verify(Storage(str(folder))).problems == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "table"])
def test_without_a_whole_commit_the_run_is_refused_and_nothing_written(
    kind: str, interrupted: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    for manifest in (newest(folder), CommitStore(Storage(str(folder))).read_manifest("manifest-000002.json")):
        (folder / "commits" / KINDS[kind](manifest)).unlink(missing_ok=True)
    left = sorted((folder / "commits").iterdir())
    with pytest.raises(DamageError, match=r"has no whole commit: .* is missing"):
        rayfl.run(small_experiment(tmp_path, "run", "scaffold", backend="inline"))
    assert sorted((folder / "commits").iterdir()) == left


def test_a_run_whose_commits_are_all_gone_does_not_start_over(interrupted: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    shutil.rmtree(folder / "commits")
    table = (folder / "rounds.parquet").read_bytes()
    with pytest.raises(DamageError, match="has results, but commits/ has no manifest"):
        rayfl.run(small_experiment(tmp_path, "run", "scaffold", backend="inline"))
    assert (folder / "rounds.parquet").read_bytes() == table


def test_another_runs_commits_are_refused(interrupted: Path, tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "run", "scaffold", backend="inline")
    config["train"] = config["train"] | {"lr": 0.2}
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(config, callbacks=[Interrupt(1)])
    shutil.rmtree(tmp_path / "run" / "commits")
    shutil.copytree(interrupted / "commits", tmp_path / "run" / "commits")
    with pytest.raises(RunError, match=r"manifest-000003.json in .* is of another run"):
        rayfl.run(config)


def test_a_run_from_before_skipped_clients_were_noted_goes_on(calm: Path, interrupted: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(interrupted, tmp_path / "run"))
    store, manifest = CommitStore(Storage(str(folder))), newest(folder)
    tables = {name: file for name, file in manifest.tables.items() if name != "skipped"}
    store.write_manifest(manifest.model_copy(update={"tables": tables}))
    (folder / "skipped.parquet").unlink()
    rayfl.run(small_experiment(tmp_path, "run", "scaffold", backend="inline"))
    assert_same(outcome(calm), outcome(folder))
