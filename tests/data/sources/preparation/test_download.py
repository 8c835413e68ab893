"""Downloads from a server on this machine: resuming, checksums, waiting for each other, atomic names."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rayfl.data.sources.preparation.download import fetch
from rayfl.errors import DataError
from tests.support.server import Server, serving

CONTENT = np.random.default_rng(0).bytes(1_000_000)
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("rayfl.data.sources.preparation.download.RETRY_PAUSES_S", (0.0, 0.0))
    with serving(Server({"/a.zip": CONTENT})) as running:
        yield running


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize("digest", [SHA256, MD5, None])
def test_a_file_is_downloaded_once(server: Server, tmp_path: Path, digest: str | None) -> None:
    told: list[tuple[str, int, int | None]] = []
    for _ in range(2):
        fetch(server.url("/a.zip"), tmp_path / "x" / "a.zip", digest, progress=lambda *news: told.append(news))
    assert (tmp_path / "x" / "a.zip").read_bytes() == CONTENT
    assert server.requests == [("/a.zip", None)]
    assert told[-1] == ("a.zip", len(CONTENT), len(CONTENT))
    assert leftovers(tmp_path / "x") == ["a.zip"]


def test_a_cut_connection_goes_on_where_it_ended(server: Server, tmp_path: Path) -> None:
    server.cut_after = [300_000, 500_000]
    fetch(server.url("/a.zip"), tmp_path / "a.zip", SHA256)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == [None, "bytes=300000-", "bytes=800000-"]


def test_a_later_process_goes_on_with_what_is_there(server: Server, tmp_path: Path) -> None:
    server.cut_after = [300_000, 0, 0, 0]
    with pytest.raises(DataError, match="300000 bytes so far are kept, and the same command goes on"):
        fetch(server.url("/a.zip"), tmp_path / "a.zip")
    assert not (tmp_path / "a.zip").exists()
    server.cut_after, server.requests = [], []
    fetch(server.url("/a.zip"), tmp_path / "a.zip")
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert server.requests == [("/a.zip", "bytes=300000-")]


def test_a_file_that_changed_meanwhile_is_begun_again(server: Server, tmp_path: Path) -> None:
    server.cut_after = [300_000, 0, 0, 0]
    with pytest.raises(DataError):
        fetch(server.url("/a.zip"), tmp_path / "a.zip")
    server.files["/a.zip"], server.etag, server.cut_after = CONTENT[::-1], '"v2"', []
    fetch(server.url("/a.zip"), tmp_path / "a.zip")
    assert (tmp_path / "a.zip").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize(("etag", "ranges", "digest"), [(None, True, None), ('"v1"', False, None), (None, True, MD5)])
def test_servers_that_cannot_resume_or_name_versions(
    server: Server, tmp_path: Path, etag: str | None, ranges: bool, digest: str | None
) -> None:
    server.etag, server.ranges, server.cut_after = etag, ranges, [300_000]
    fetch(server.url("/a.zip"), tmp_path / "a.zip", digest)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    # without anything that tells versions apart a beginning is not trusted
    assert server.requests[1][1] == (None if etag is None and digest is None else "bytes=300000-")


def test_a_beginning_of_another_address_is_dropped(server: Server, tmp_path: Path) -> None:
    server.files["/b.zip"] = CONTENT[::-1]
    server.cut_after = [300_000, 0, 0, 0]
    with pytest.raises(DataError):
        fetch(server.url("/a.zip"), tmp_path / "a.zip")
    server.cut_after = []
    fetch(server.url("/b.zip"), tmp_path / "a.zip")
    assert (tmp_path / "a.zip").read_bytes() == CONTENT[::-1]


def test_a_complete_beginning_is_only_checked(server: Server, tmp_path: Path) -> None:
    server.cut_after = [300_000, 0, 0, 0]
    with pytest.raises(DataError):
        fetch(server.url("/a.zip"), tmp_path / "a.zip", SHA256)
    (tmp_path / ".a.zip.partial").write_bytes(CONTENT)
    server.cut_after = []
    fetch(server.url("/a.zip"), tmp_path / "a.zip", SHA256)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path) -> None:
    wanted = "sha256:" + "0" * 64
    with pytest.raises(DataError, match=f"has the sha256 {SHA256[7:]}, not {'0' * 64}"):
        fetch(server.url("/a.zip"), tmp_path / "a.zip", wanted)
    assert leftovers(tmp_path) == []


def test_a_file_that_is_there_is_checked_too(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"a\.zip is there, but has the md5 .*delete it"):
        fetch(server.url("/a.zip"), tmp_path / "a.zip", MD5)
    assert server.requests == []


@pytest.mark.parametrize("digest", ["sha256:12", "crc:123", "12"])
def test_a_malformed_checksum_is_refused(server: Server, tmp_path: Path, digest: str) -> None:
    with pytest.raises(DataError, match="is no checksum"):
        fetch(server.url("/a.zip"), tmp_path / "a.zip", digest)


def test_offline_nothing_is_asked_for(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.zip does not exist and nothing is downloaded offline.*--source"):
        fetch(server.url("/a.zip"), tmp_path / "a.zip", offline=True)
    assert server.requests == []
    (tmp_path / "a.zip").write_bytes(CONTENT)
    fetch(server.url("/a.zip"), tmp_path / "a.zip", SHA256, offline=True)


def test_server_errors(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"/none cannot be downloaded: HTTP Error 404"):
        fetch(server.url("/none"), tmp_path / "a.zip")
    assert len(server.requests) == 1
    server.statuses = [503, 503]
    fetch(server.url("/a.zip"), tmp_path / "a.zip", SHA256)
    assert (tmp_path / "a.zip").read_bytes() == CONTENT


def test_nobody_there(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be downloaded: .*refused"):
        fetch("http://127.0.0.1:9/a.zip", tmp_path / "a.zip")
    with pytest.raises(DataError, match="only http and https"):
        fetch("ftp://127.0.0.1/a.zip", tmp_path / "a.zip")


def test_many_ask_and_one_downloads(server: Server, tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=fetch, args=(server.url("/a.zip"), tmp_path / "a.zip", SHA256)) for _ in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a.zip").read_bytes() == CONTENT
    assert len(server.requests) == 1


def test_a_local_file_is_copied(tmp_path: Path) -> None:
    (tmp_path / "mine.zip").write_bytes(CONTENT)
    fetch(str(tmp_path / "mine.zip"), tmp_path / "root" / "a.zip", SHA256, offline=True)
    assert (tmp_path / "root" / "a.zip").read_bytes() == CONTENT
    with pytest.raises(DataError, match=r"none\.zip does not exist"):
        fetch(str(tmp_path / "none.zip"), tmp_path / "b.zip")
    with pytest.raises(DataError, match=r"mine\.zip has the md5"):
        fetch(str(tmp_path / "mine.zip"), tmp_path / "b.zip", "md5:" + "0" * 32)
    assert not (tmp_path / "b.zip").exists()
