"""What a server keeps of each client is written when it has changed, and every commit is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfl.errors import DamageError
from rayfl.params import Tree, copy
from rayfl.runs.verification import Report, _content
from rayfl.storage import server_parts
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import CheckedCommit, Manifest, StoredFile, parse, version_of, with_checksum
from rayfl.storage.server_parts import ServerParts
from tests.support.toys import assert_equal

SIZE = 2000
"""Numbers of a part: many, as headers count in a file's size."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_parts, "LEAST_BYTES", 0)


@pytest.fixture
def store(tmp_path: Path) -> CommitStore:
    return CommitStore(Storage(str(tmp_path)))


def model(value: float) -> Tree:
    return {"w": torch.full((SIZE,), value), "b": torch.tensor(value)}


def server(clients: int = 6) -> Tree:
    """A model, models of clients, an update of each, and what has no parts."""
    return {
        "model": model(0.0),
        "fleet": {str(client): model(float(client)) for client in range(clients)},
        "(selection)": {
            "updates": {str(client): torch.full((SIZE,), -float(client)) for client in range(clients)},
            "round": 3,
        },
        "none": {},
        "counts": {"0": 2, "1": 5},
    }


def commit(store: CommitStore, parts: ServerParts, rounds: int, tree: Tree) -> Manifest:
    file, held = parts.write(store, rounds, tree)
    manifest = Manifest(
        version=version_of(held), rounds_completed=rounds, fingerprint="print", server=file, server_parts=held
    )
    store.write_manifest(manifest)
    store.collect(2)
    return manifest


def changed(tree: Tree, *clients: int) -> Tree:
    """Another model of the server and of these clients, the others as they are."""
    fleet = {**tree["fleet"], **{str(client): model(100 + client) for client in clients}}
    return {**tree, "model": model(1.0), "fleet": fleet}


def written_in(store: CommitStore, file: StoredFile) -> set[str]:
    """The clients of whom a file has a model."""
    return set(store_tree(store, file).get("fleet", {}))


def store_tree(store: CommitStore, file: StoredFile) -> Tree:
    from rayfl.storage import treefile

    return treefile.loads(store.read(file), file.name)


def test_every_commit_has_the_whole_tree_and_writes_what_has_changed(store: CommitStore) -> None:
    parts, tree = ServerParts(), server()
    for rounds, clients in enumerate([(), (1,), (1, 4), (), (0, 2)], start=1):
        before = tree
        tree = changed(tree, *clients) if rounds > 1 else tree
        found = commit(store, parts, rounds, tree)
        assert_equal(store.read_server(found), tree)
        assert list(store.read_server(found)["fleet"]) == list(tree["fleet"])
        new = [file for file in found.server_files if f"-{rounds:06d}-" in file.name]
        own = {client for file in new if file != found.server for client in written_in(store, file)}
        assert own == ({str(client) for client in clients} if rounds > 1 else set(before["fleet"]))
        assert store_tree(store, found.server)["fleet"] == {client: {} for client in tree["fleet"]}
        assert store.damage(found, thoroughly=True) == {}


def test_what_was_written_to_in_place_is_written_again(store: CommitStore) -> None:
    parts, tree = ServerParts(), server()
    commit(store, parts, 1, tree)
    tree["fleet"]["3"]["w"].add_(1)
    tree["fleet"]["2"]["b"] = tree["fleet"]["2"]["b"].clone()
    tree["(selection)"]["updates"]["5"].view(2, -1)[0, 0] = 7
    found = commit(store, parts, 2, tree)
    assert_equal(store.read_server(found), tree)
    new = {path for path, file in found.server_parts.items() if "-000002-" in file.name}
    assert new == {"fleet/3", "fleet/2", "(selection)/updates/5"}


def test_a_run_that_continues_goes_on_writing_what_changes(store: CommitStore) -> None:
    parts, tree = ServerParts(), server()
    first = commit(store, parts, 1, tree)
    again = store.read_server(first)
    other = ServerParts()
    other.restore(first, again)
    found = commit(store, other, 2, changed(again, 2))
    assert [path for path, file in found.server_parts.items() if "-000002-" in file.name] == ["fleet/2"]
    assert_equal(store.read_server(found), changed(tree, 2))


def test_new_clients_and_clients_that_go(store: CommitStore) -> None:
    parts, tree = ServerParts(), server()
    commit(store, parts, 1, tree)
    fleet = {client: kept for client, kept in tree["fleet"].items() if client != "4"}
    found = commit(store, parts, 2, {**tree, "fleet": {**fleet, "9": model(9.0)}})
    assert list(store.read_server(found)["fleet"]) == ["0", "1", "2", "3", "5", "9"]
    none = commit(store, parts, 3, {"model": model(2.0), "fleet": {}})
    assert not none.server_parts and none.version == 4
    assert_equal(store.read_server(none), {"model": model(2.0), "fleet": {}})


def test_files_hold_at_most_twice_of_what_is_needed(store: CommitStore, tmp_path: Path) -> None:
    generator, parts, tree = np.random.default_rng(0), ServerParts(), server(30)
    for rounds in range(1, 30):
        found = commit(store, parts, rounds, tree)
        assert_equal(store.read_server(found), tree)
        size = sum(file.size for file in found.server_files)
        assert size < 2.3 * (2 * 30 * SIZE * 4) + 2 * SIZE * 4
        tree = changed(tree, *generator.integers(30, size=3).tolist())
    on_disk = {path.name for path in (tmp_path / "commits").glob("parts-*")}
    kept = [store.read_manifest(name) for name in store.manifests()]
    assert on_disk == {file.name for one in kept for file in one.server_parts.values()} and len(kept) == 2


def test_little_is_one_file_as_before(store: CommitStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_parts, "LEAST_BYTES", 1 << 20)
    found = commit(store, ServerParts(), 1, server())
    assert found.version == 4 and not found.server_parts and "server_parts" not in with_checksum(found)
    assert_equal(store_tree(store, found.server), server())


def test_inference_tensors_are_always_written(store: CommitStore) -> None:
    with torch.inference_mode():
        tree = {"fleet": {"0": torch.ones(40), "1": torch.ones(40)}}
    parts = ServerParts()
    commit(store, parts, 1, tree)
    found = commit(store, parts, 2, tree)
    assert all("-000002-" in file.name for file in found.server_parts.values())


def test_a_tensor_that_has_gone_is_not_the_next_one_at_its_place(store: CommitStore) -> None:
    parts, tree = ServerParts(), {"fleet": {"0": torch.ones(40), "1": torch.ones(40)}}
    commit(store, parts, 1, tree)
    for value in range(2, 9):
        tree["fleet"]["0"] = torch.full((40,), float(value))
        assert_equal(store.read_server(commit(store, parts, value, copy(tree) | {})), tree)


@pytest.mark.parametrize("which", ["server-", "parts-"])
def test_a_commit_without_one_of_its_files_is_not_used(which: str, store: CommitStore, tmp_path: Path) -> None:
    parts, tree = ServerParts(), server()
    commit(store, parts, 1, tree)
    found = commit(store, parts, 2, changed(tree, 1))
    (victim,) = (file for file in found.server_files if file.name.startswith(f"{which}000002"))
    (tmp_path / "commits" / victim.name).unlink()
    assert not CheckedCommit(found, store.damage(found, thoroughly=False)).has_server
    used = store.latest()
    assert used is not None and used.rounds_completed == 1
    assert_equal(store.read_server(used), tree)


def test_a_file_that_lacks_a_part_is_named(store: CommitStore) -> None:
    parts = ServerParts()
    found = commit(store, parts, 1, server())
    file = next(iter(found.server_parts.values()))
    wrong: dict[str, Any] = {"server_parts": {**found.server_parts, "fleet/99": file}}
    with pytest.raises(DamageError, match=r"parts-000001-\w+\.safetensors lacks the server's fleet/99"):
        store.read_server(found.model_copy(update=wrong))


def test_an_older_rayfl_knows_that_it_cannot_read_it(store: CommitStore) -> None:
    found = commit(store, ServerParts(), 1, server())
    content = with_checksum(found)
    assert content["version"] == found.version == 5
    assert parse("manifest-000001.json", json.dumps(content).encode(), "here") == found


def test_verifying_names_a_file_that_lacks_parts(store: CommitStore) -> None:
    report, found = Report(), commit(store, ServerParts(), 1, server())
    file = next(iter(found.server_parts.values()))
    wrong = found.model_copy(update={"server_parts": {**found.server_parts, "fleet/98": file, "fleet/99": file}})
    assert _content(store, found, file, None, report) == []
    (said,) = _content(store, wrong, file, None, report)
    assert said == f"commits/{file.name} lacks 2 parts of the server's tree, such as fleet/98"
