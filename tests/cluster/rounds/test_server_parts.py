"""Runs whose server keeps something of each client write it in parts, and lose nothing by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rayfl
from rayfl.errors import DamageError
from rayfl.runs.verification import verify
from rayfl.storage import server_parts
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import Manifest
from tests.support.commits_alike import assert_same_commits
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedamp": ("fedamp", {}),
    "divfl": ("fedavg", {"selection": {"name": "divfl"}}),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_parts, "LEAST_BYTES", 0)


def experiment(folder: Path, name: str, kind: str) -> dict[str, Any]:
    method, sections = METHODS[kind]
    # a model whose bytes count for more than the headers of files
    further = {"storage": {"keep_commits": 4}, "model": {"name": "two_nn", "hidden": [200]}, **sections}
    found = small_experiment(folder, name, method, backend="inline")
    return {**found, **further, "train": {**found["train"], "clients_per_round": 1}}


def newest(folder: Path) -> Manifest:
    found = CommitStore(Storage(str(folder))).latest()
    assert found is not None
    return found


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.first_case
def test_an_interrupted_run_has_the_same_files_and_rewrites_no_part(kind: str, tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "whole", kind))
    pieces = experiment(tmp_path, "pieces", kind)
    for after in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            rayfl.run(pieces, callbacks=[Interrupt(after)])
    rayfl.run(pieces)
    assert_same_commits(tmp_path / "whole", tmp_path / "pieces")
    found = newest(tmp_path / "pieces")
    assert len({file.name for file in found.server_parts.values()}) > 1
    assert verify(Storage(str(tmp_path / "pieces"))).problems == []


def test_it_is_the_run_that_has_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rayfl.run(experiment(tmp_path, "parts", "fedamp"))
    monkeypatch.setattr(server_parts, "LEAST_BYTES", 1 << 40)
    rayfl.run(experiment(tmp_path, "one", "fedamp"))
    assert_same(outcome(tmp_path / "parts"), outcome(tmp_path / "one"))
    assert newest(tmp_path / "parts").server_parts and not newest(tmp_path / "one").server_parts


def test_a_damaged_part_is_found_and_the_commit_before_it_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rayfl.run(experiment(tmp_path, "whole", "fedamp"))
    pieces = experiment(tmp_path, "pieces", "fedamp")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(pieces, callbacks=[Interrupt(3)])
    folder = tmp_path / "pieces" / "commits"
    (victim,) = {file.name for file in newest(tmp_path / "pieces").server_parts.values() if "-000003-" in file.name}
    content = (folder / victim).read_bytes()
    (folder / victim).write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    assert any(victim in problem for problem in verify(Storage(str(tmp_path / "pieces"))).problems)
    rayfl.run(pieces)
    assert "The commit of round 2 is whole and used instead" in caplog.text
    assert_same(outcome(tmp_path / "whole"), outcome(tmp_path / "pieces"))


def test_without_a_part_that_all_commits_need_the_run_is_refused(tmp_path: Path) -> None:
    run = experiment(tmp_path, "run", "fedamp") | {"storage": {"keep_commits": 2}}
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(run, callbacks=[Interrupt(3)])
    store = CommitStore(Storage(str(tmp_path / "run")))
    needed = [{file.name for file in store.read_manifest(name).server_parts.values()} for name in store.manifests()]
    (common,) = set.intersection(*needed)
    (tmp_path / "run" / "commits" / common).unlink()
    with pytest.raises(DamageError, match=common):
        rayfl.run(run)
