"""The commit protocol: a run is what its newest manifest says."""

from __future__ import annotations

import hashlib
import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfl.errors import DamageError, RunError
from rayfl.params import Tree
from rayfl.storage import files
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import FORMAT_VERSION, version_of
from tests.support.small_commits import commit, server, state
from tests.support.toys import assert_equal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "commits"


@pytest.fixture
def store(tmp_path: Path) -> CommitStore:
    return CommitStore(Storage(str(tmp_path)))


def test_round_trip(store: CommitStore, tmp_path: Path) -> None:
    written = commit(store, 3, {0: {4: 1.0, 0: 2.0}, 1: {11: 3.0}})
    other = CommitStore(Storage(tmp_path.as_uri()))
    manifest = other.latest()
    assert manifest == written
    assert manifest is not None
    assert manifest.version == version_of({})
    assert_equal(other.read_server(manifest), server(3))
    assert_equal(other.read_states(manifest.states[4]), {0: state(2.0), 4: state(1.0)})
    assert_equal(other.read_states(manifest.states[11]), {11: state(3.0)})
    assert other.read(manifest.tables["rounds"][0]) == b"table 3"


def test_checksums_are_compared_piece_by_piece_and_the_log_says_of_how_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_CHUNK_BYTES", 1 << 16)
    store = CommitStore(Storage(str(tmp_path)))
    written = store.write_states(1, 0, {client: {"w": torch.zeros(1 << 18)} for client in range(8)})
    whole = commit(store, 1, {}).model_copy(update={"states": dict.fromkeys(range(8), written)})
    store.damage(whole, thoroughly=True)  # imports
    tracemalloc.start()
    try:
        with caplog.at_level(logging.INFO, "rayfl"):
            assert store.damage(whole, thoroughly=True) == {}
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < written.size / 4
    size = sum(file.size for file in whole.stored())
    assert f"comparing checksums in {tmp_path}/commits: {len(whole.stored())} files, {size:,} bytes" in caplog.text


def test_a_run_without_commits(store: CommitStore) -> None:
    assert store.latest() is None


def test_a_manifest_is_there_before_it_is_called_the_newest(tmp_path: Path) -> None:
    written: list[str] = []

    class Noting(Storage):
        def write(self, path: str, data: bytes) -> None:
            written.append(path.removeprefix("commits/"))
            super().write(path, data)

    commit(CommitStore(Noting(str(tmp_path))), 3, {0: {4: 1.0}})
    assert written[-2:] == ["manifest-000003.json", "newest.json"]


def test_states_may_be_empty_or_hold_empty_parts(store: CommitStore) -> None:
    states: dict[int, Tree] = {1: {}, 2: {"hpm": {}, "n": 1}, 3: state(1.0)}
    assert_equal(store.read_states(store.write_states(1, 0, states)), states)


def test_a_second_try_at_a_round_does_not_touch_the_files_of_the_first(store: CommitStore) -> None:
    first = store.write_states(1, 0, {1: state(1.0)})
    second = store.write_states(1, 0, {1: state(2.0)})
    assert_equal(store.read_states(first), {1: state(1.0)})
    assert_equal(store.read_states(second), {1: state(2.0)})


def test_the_newest_manifest_counts(store: CommitStore) -> None:
    for rounds in (1, 2, 9, 10, 100, 99):
        commit(store, rounds, {})
    latest = store.latest()
    assert latest is not None
    assert latest.rounds_completed == 100


def test_a_state_stays_where_it_was_written_until_it_changes(store: CommitStore) -> None:
    commit(store, 1, {0: {1: 1.0, 2: 1.0}})
    commit(store, 2, {0: {2: 2.0}})
    latest = store.latest()
    assert latest is not None
    found = {client: store.read_states(file)[client] for client, file in latest.states.items()}
    assert_equal(found, {1: state(1.0), 2: state(2.0)})


@pytest.mark.parametrize("kind", ["server", "states", "table"])
def test_damage_is_noticed_and_named(store: CommitStore, folder: Path, kind: str) -> None:
    manifest = commit(store, 3, {0: {4: 1.0}})
    files = {"server": manifest.server, "states": manifest.states[4], "table": manifest.tables["rounds"][0]}
    file = files[kind]
    reads: dict[str, Any] = {
        "server": lambda: store.read_server(manifest),
        "states": lambda: store.read_states(file),
        "table": lambda: store.read(file),
    }
    content = bytearray((folder / file.name).read_bytes())
    content[-1] ^= 1
    (folder / file.name).write_bytes(content)
    with pytest.raises(RunError, match=rf"commits/{file.name} in {folder.parent} is damaged"):
        reads[kind]()
    (folder / file.name).unlink()
    with pytest.raises(RunError, match=rf"commits/{file.name} is missing from {folder.parent}"):
        reads[kind]()


BROKEN = [
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b"[" * 9999,
    b"{}",
    b'{"version": 1}',
    b'{"version": 1, "rounds_completed": "x"}',
]


@pytest.mark.parametrize("content", BROKEN, ids=lambda content: repr(content[:40]))
def test_a_damaged_manifest_is_named_and_the_commit_before_it_is_used(
    store: CommitStore, folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    before = commit(store, 1, {})
    commit(store, 2, {})
    (folder / "manifest-000002.json").write_bytes(content)
    assert store.latest() == before
    assert "commits/manifest-000002.json in" in caplog.text
    assert "is damaged" in caplog.text
    assert "The commit of round 1 is whole and used instead" in caplog.text
    (folder / "manifest-000001.json").unlink()
    with pytest.raises(DamageError, match=r"has no whole commit: commits/manifest-000002.json in .* is damaged"):
        store.latest()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_flipped_bit_of_a_manifest_goes_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("run")
    store = CommitStore(Storage(str(root)))
    before = commit(store, 1, {0: {1: 1.0}})
    commit(store, 2, {0: {2: 1.0}})
    file = root / "commits" / "manifest-000002.json"
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    try:
        unchanged = store.read_manifest("manifest-000002.json")
    except DamageError:
        assert store.latest() == before
    else:  # white space
        assert json.loads(content) == json.loads(unchanged.model_dump_json()) | {
            "checksum": json.loads(content)["checksum"]
        }


def rewritten(folder: Path, name: str, **changes: Any) -> None:
    """Changes a manifest, and its checksum with it."""
    content = json.loads((folder / name).read_text())
    del content["checksum"]
    content |= changes
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    (folder / name).write_text(json.dumps(content | {"checksum": hashlib.sha256(text.encode()).hexdigest()}))


def test_a_newer_version_is_refused_and_no_older_commit_taken_for_it(store: CommitStore, folder: Path) -> None:
    commit(store, 1, {})
    commit(store, 2, {})
    rewritten(folder, "manifest-000002.json", version=FORMAT_VERSION + 1, something_new=[1, 2])
    with pytest.raises(RunError, match=rf"has format version {FORMAT_VERSION + 1}, this rayfl reads up to") as refused:
        store.latest()
    assert not isinstance(refused.value, DamageError)


@pytest.mark.parametrize("version", [0, -1, None, "2", 2.5, True])
def test_what_is_no_version_is_damage(store: CommitStore, folder: Path, version: Any) -> None:
    before = commit(store, 1, {})
    commit(store, 2, {})
    rewritten(folder, "manifest-000002.json", version=version)
    assert store.latest() == before


@pytest.mark.parametrize("version", [1, 2])
def test_manifests_of_earlier_versions_are_read(store: CommitStore, folder: Path, version: int) -> None:
    written = commit(store, 1, {0: {1: 1.0}})
    path = folder / "manifest-000001.json"
    content = json.loads(path.read_text())
    content["tables"] = {name: file for name, (file,) in content["tables"].items()}
    if version == 1:
        for file in (content["server"], *content["states"].values(), *content["tables"].values()):
            del file["size"]
        (folder / "newest.json").unlink()
    path.write_text(json.dumps(content))
    rewritten(folder, path.name, version=version)
    if version == 1:
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "checksum"}))
    found = store.latest(thoroughly=True)
    assert found is not None
    assert found.version == version
    assert found.files() == written.files()
    assert found.tables["rounds"][0].name == written.tables["rounds"][0].name


@pytest.mark.parametrize("name", ["../config.yaml", "/etc/passwd", "a/b", "..", "", "a\0b", ".hidden", "a b\n"])
def test_a_manifest_names_nothing_outside_of_its_folder(store: CommitStore, folder: Path, name: str) -> None:
    before = commit(store, 1, {})
    after = commit(store, 2, {})
    rewritten(folder, "manifest-000002.json", server={**after.server.model_dump(), "name": name})
    assert store.latest() == before


def test_a_manifest_under_another_ones_name_is_damage(store: CommitStore, folder: Path) -> None:
    commit(store, 1, {})
    before = commit(store, 2, {})
    (folder / "manifest-000003.json").write_bytes((folder / "manifest-000001.json").read_bytes())
    assert store.latest() == before


def test_a_manifest_that_has_gone_missing_is_named(
    store: CommitStore, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = commit(store, 1, {})
    commit(store, 2, {})
    (folder / "manifest-000002.json").unlink()
    assert store.latest() == before
    assert "commits/manifest-000002.json is missing from" in caplog.text
    (folder / "manifest-000001.json").unlink()
    with pytest.raises(DamageError, match=r"manifest-000002.json is missing"):
        store.latest()


@pytest.mark.parametrize("content", BROKEN)
def test_a_damaged_note_of_the_newest_commit_does_no_harm(
    store: CommitStore, folder: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    latest = commit(store, 1, {})
    (folder / "newest.json").write_bytes(content)
    assert store.latest() == latest
    assert "newest.json in" in caplog.text


@pytest.mark.parametrize("kind", ["server", "states", "table"])
@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "missing", "foreign"])
def test_a_damaged_commit_is_passed_over_for_the_one_before(
    store: CommitStore, folder: Path, kind: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = commit(store, 1, {0: {4: 1.0}})
    manifest = commit(store, 2, {0: {4: 2.0}})
    file = {"server": manifest.server, "states": manifest.states[4], "table": manifest.tables["rounds"][0]}[kind]
    path = folder / file.name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    changed = {"flipped bit": bytes(content), "truncated": path.read_bytes()[:-1], "foreign": b"x" * len(content)}
    path.unlink()
    if damage in changed:
        path.write_bytes(changed[damage])
    assert store.latest(thoroughly=True) == before
    assert f"commits/{file.name}" in caplog.text
    # Without reading everything, only what the folder's listing shows is seen.
    assert store.latest() == (before if damage in ("truncated", "missing") else manifest)
