"""Which files of a run a collection deletes, and what a crash in the middle leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import Manifest, StoredFile
from tests.support.small_commits import commit, server, state
from tests.support.toys import assert_equal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "commits"


@pytest.fixture
def store(tmp_path: Path) -> CommitStore:
    return CommitStore(Storage(str(tmp_path)))


def test_newer_commits_that_are_not_whole_can_be_given_up(store: CommitStore, folder: Path) -> None:
    before = commit(store, 1, {})
    manifest = commit(store, 2, {})
    (folder / manifest.server.name).unlink()
    store.drop_after(1)
    assert store.manifests() == ["manifest-000001.json"]
    assert store.missing_newest() == []
    assert store.latest() == before


def test_collecting_gives_up_a_damaged_commit_for_an_older_one(store: CommitStore, folder: Path) -> None:
    for rounds in (1, 2, 3):
        commit(store, rounds, {})
    (folder / "manifest-000002.json").write_bytes(b"")
    store.collect(2)
    assert store.manifests() == ["manifest-000001.json", "manifest-000003.json"]


HISTORIES = st.lists(
    st.dictionaries(st.integers(0, 2), st.dictionaries(st.integers(0, 6), st.just(0.0), min_size=1), max_size=3),
    min_size=1,
    max_size=7,
)


@settings(max_examples=25, deadline=None)
@given(HISTORIES, st.integers(1, 8), st.booleans())
def test_collecting_keeps_exactly_what_the_kept_manifests_need(
    tmp_path_factory: pytest.TempPathFactory, history: list[dict[int, dict[int, float]]], keep: int, every: bool
) -> None:
    root = tmp_path_factory.mktemp("run")
    store = CommitStore(Storage(str(root)))
    manifests: list[Manifest] = []
    for rounds, changed in enumerate(history, start=1):
        seen: set[int] = set()
        apart = {h: {c: v for c, v in s.items() if not (c in seen or seen.add(c))} for h, s in changed.items()}  # type: ignore[func-returns-value]
        manifests.append(commit(store, rounds, {host: states for host, states in apart.items() if states}))
        if every:
            store.collect(keep)
    (root / "commits" / "states-000099-0000.safetensors").write_bytes(b"left by a crash")
    (root / "commits" / ".manifest-000099.json.1234.tmp").write_bytes(b"left by a crash")
    store.collect(keep)
    kept = manifests[-keep:]
    expected = {f"manifest-{m.rounds_completed:06d}.json" for m in kept}.union(*(m.files() for m in kept))
    expected.add("newest.json")
    assert set(os.listdir(root / "commits")) == expected
    assert store.latest() == manifests[-1]
    for manifest in kept:
        assert_equal(store.read_server(manifest), server(manifest.rounds_completed))
        for client, file in manifest.states.items():
            assert client in store.read_states(file)


def test_at_least_one_commit_is_kept(store: CommitStore) -> None:
    commit(store, 1, {})
    with pytest.raises(ValueError, match="at least one"):
        store.collect(0)
    assert store.latest() is not None


def test_collecting_nothing(store: CommitStore) -> None:
    store.collect(2)
    assert store.latest() is None


def test_manifests_are_deleted_before_their_files(store: CommitStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for rounds in (1, 2, 3):
        commit(store, rounds, {0: {1: 1.0}})
    deleted: list[str] = []
    monkeypatch.setattr(Storage, "delete", lambda _, path: deleted.append(Path(path).name))
    store.collect(1)
    assert sorted(deleted[:2]) == ["manifest-000001.json", "manifest-000002.json"]
    assert not any(name.startswith("manifest-") for name in deleted[2:])
    assert len(deleted) == 8


@pytest.mark.parametrize("written", range(4))
def test_a_crash_before_the_manifest_leaves_the_commit_before_the_latest(
    store: CommitStore, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    before = commit(store, 1, {0: {1: 1.0, 2: 1.0}})
    write = Storage.write
    calls = iter(range(10))

    def crashing(self: Storage, path: str, data: bytes) -> None:
        if next(calls) == written:
            raise KeyboardInterrupt
        write(self, path, data)

    with monkeypatch.context() as crash:
        crash.setattr(Storage, "write", crashing)
        with pytest.raises(KeyboardInterrupt):
            commit(store, 2, {0: {1: 2.0}})
    assert store.latest() == before
    assert_equal(store.read_server(before), server(1))
    assert_equal(store.read_states(before.states[1]), {1: state(1.0), 2: state(1.0)})
    again = commit(store, 2, {0: {1: 2.0}})
    assert store.latest() == again
    assert_equal(store.read_states(again.states[1]), {1: state(2.0)})


def test_the_files_of_a_manifest() -> None:
    one, two = StoredFile(name="one", sha256="1"), StoredFile(name="two", sha256="2")
    manifest = Manifest(rounds_completed=1, fingerprint="f", server=one, states={1: two, 2: two}, tables={})
    assert manifest.files() == {"one", "two"}
