"""Files are replaced as a whole, on any file system."""

from __future__ import annotations

import errno
import hashlib
import os
import tracemalloc
from pathlib import Path

import pytest

from rayfl.errors import RunError
from rayfl.storage.files import Storage


@pytest.fixture(params=["path", "uri", "relative", "home"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """One and the same folder, written in each way a user may."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "runs"
    return Storage({"path": str(folder), "uri": folder.as_uri(), "relative": "runs", "home": "~/runs"}[request.param])


def test_write_and_read(storage: Storage, tmp_path: Path) -> None:
    storage.write("a/b/file", b"one")
    assert storage.read("a/b/file") == b"one"
    assert (tmp_path / "runs/a/b/file").read_bytes() == b"one"
    storage.write("a/b/file", b"")
    assert storage.read("a/b/file") == b""
    assert storage.local_path == tmp_path / "runs"


def test_a_local_file_is_in_memory_once_while_it_is_read(tmp_path: Path) -> None:
    size = 4 << 20
    storage = Storage(str(tmp_path))
    storage.write("x", bytes(size))
    storage.read("x")  # imports
    tracemalloc.start()
    try:
        assert len(storage.read("x")) == size
        assert size <= tracemalloc.get_traced_memory()[1] < 1.5 * size
    finally:
        tracemalloc.stop()


def test_names_exists_delete(storage: Storage) -> None:
    assert storage.names("commits") == []
    assert not storage.exists("commits")
    for name in ("b", "a", "c", "deeper/d"):
        storage.write(f"commits/{name}", b"x")
    assert storage.names("commits") == ["a", "b", "c"]
    assert storage.names("commits/deeper") == ["d"]
    assert storage.exists("commits")
    assert storage.exists("commits/b")
    storage.delete("commits/b")
    storage.delete("commits/b")
    storage.delete("nowhere/b")
    assert storage.names("commits") == ["a", "c"]
    assert not storage.exists("commits/b")
    with pytest.raises(FileNotFoundError):
        storage.read("commits/b")
    with pytest.raises(FileNotFoundError):
        storage.read("nowhere/b")


def test_a_folder_inside(storage: Storage, tmp_path: Path) -> None:
    inner = storage.inside("a run (2) 100%")
    inner.write("file", b"x")
    assert (tmp_path / "runs" / "a run (2) 100%" / "file").exists()
    assert inner.local_path == tmp_path / "runs" / "a run (2) 100%"
    assert storage.read("a run (2) 100%/file") == b"x"


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("/data/runs/", "/data/runs/mine"),
        ("runs", "runs/mine"),
        ("s3://bucket/runs", "s3://bucket/runs/mine"),
        ("s3://bucket/runs/?region=eu-west-1&scheme=http", "s3://bucket/runs/mine?region=eu-west-1&scheme=http"),
    ],
)
def test_options_of_a_uri_stay_at_its_end(uri: str, expected: str) -> None:
    assert Storage(uri).inside("mine").uri == expected


@pytest.mark.parametrize("uri", ["nonsense://bucket/folder", "file://host-without-path"])
def test_a_uri_that_cannot_be_used_is_named(uri: str) -> None:
    with pytest.raises(RunError, match=uri):
        Storage(uri).names("commits")


@pytest.mark.parametrize("function", ["replace", "fsync"])
def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(str(tmp_path))
    storage.write("folder/file", b"old")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, function, fails)
        with pytest.raises(RunError, match=rf"cannot write {tmp_path}/folder/file: No space left on device"):
            storage.write("folder/file", b"new")
    assert storage.read("folder/file") == b"old"
    assert os.listdir(tmp_path / "folder") == ["file"]
    storage.write("folder/file", b"new")
    assert storage.read("folder/file") == b"new"
    assert os.listdir(tmp_path / "folder") == ["file"]


def test_an_interrupted_write_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Storage(str(tmp_path)).write("file", b"new")
    assert os.listdir(tmp_path) == []


def test_a_reader_sees_the_old_content_until_the_new_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(str(tmp_path))
    storage.write("file", b"old")
    seen: list[bytes] = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.extend((target.read_bytes(), source.read_bytes()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    storage.write("file", b"new")
    assert seen == [b"old", b"new"]


def test_content_and_names_are_on_the_disk_before_a_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    Storage(str(tmp_path)).write("new/deep/file", b"x")
    assert synced[0].startswith(f"{tmp_path}/new/deep/.file.")
    assert set(synced[1:]) == {f"{tmp_path}/new/deep", f"{tmp_path}/new", f"{tmp_path}"}
    synced.clear()
    Storage(str(tmp_path)).write("new/deep/file", b"y")
    assert synced[1:] == [f"{tmp_path}/new/deep"]


@pytest.mark.parametrize("place", ["below_a_file", "kernel"])
def test_an_unwritable_folder_is_named(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = f"{tmp_path}/file" if place == "below_a_file" else "/proc/rayfl"
    with pytest.raises(RunError, match=f"cannot write {folder}/commits/manifest"):
        Storage(folder).write("commits/manifest", b"x")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    storage = Storage(str(tmp_path))
    with pytest.raises(RunError, match=f"cannot read {tmp_path}/folder"):
        storage.read("folder")
    with pytest.raises(RunError, match=f"cannot read {tmp_path}/file"):
        storage.names("file")
    with pytest.raises(RunError, match=f"cannot delete {tmp_path}/folder"):
        storage.delete("folder")


def no_links(*_: object) -> None:
    """What ``os.link`` is on a file system that has no hard links."""
    raise OSError(errno.EPERM, "not supported here")


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_a_file_is_created_once(links: bool, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayfl.storage.files.SETTLE_S", 0.0)
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    assert storage.create("folder/file", b"one")
    assert not storage.create("folder/file", b"two")
    assert storage.read("folder/file") == b"one"
    assert storage.names("folder") == ["file"]


def test_of_two_who_create_a_file_without_links_the_last_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = Storage(str(tmp_path))
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr("rayfl.storage.files.time.sleep", lambda seconds: storage.write("file", b"the other's"))
    assert not storage.create("file", b"mine")
    monkeypatch.setattr("rayfl.storage.files.time.sleep", lambda seconds: storage.delete("other"))
    assert not storage.create("other", b"mine")


def test_a_link_whose_answer_was_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)  # NFS asks again

    monkeypatch.setattr(os, "link", twice)
    storage = Storage(str(tmp_path))
    assert storage.create("file", b"x")
    assert not storage.create("file", b"y")
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_creation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(RunError, match=f"cannot write {tmp_path}/file: No space left"):
        Storage(str(tmp_path)).create("file", b"x")
    assert os.listdir(tmp_path) == []


def test_digests_and_sizes(storage: Storage) -> None:
    content = os.urandom(3000)
    storage.write("folder/file", content)
    assert storage.digest("folder/file") == hashlib.sha256(content).hexdigest()
    assert storage.sizes("folder") == {"file": 3000}
    with pytest.raises(FileNotFoundError):
        storage.digest("folder/other")
