"""Storage and whole runs on an object store: an S3 server in a process of its own.

Needs the command ``moto_server`` (``pip install 'moto[s3]' flask flask-cors``, best into an environment of its own,
for its requirements do not agree with rayfl's pins) on the PATH or in the environment variable RAYFL_TEST_MOTO_SERVER.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rayfl
from rayfl.errors import RunError
from rayfl.results.schemas import TABLES
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.lease import FILE, Holder, Lease, read_lease
from rayfl.storage.tables import from_parquet
from tests.storage.test_lease import contend
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment
from tests.support.toys import assert_equal

SERVER = os.environ.get("RAYFL_TEST_MOTO_SERVER") or shutil.which("moto_server")
pytestmark = pytest.mark.skipif(
    SERVER is None, reason="there is no moto_server on the PATH or in RAYFL_TEST_MOTO_SERVER"
)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The server's address, with a bucket ``runs``."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    address = f"127.0.0.1:{port}"
    process = subprocess.Popen(
        [str(SERVER), "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 60
        while True:
            try:
                bucket = urllib.request.Request(f"http://{address}/runs", method="PUT")
                urllib.request.urlopen(bucket, timeout=5).close()
                break
            except urllib.error.URLError:
                assert time.monotonic() < until, "the server did not start"
                time.sleep(0.2)
        yield address
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def uri(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder of its own on the server."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "anything")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("rayfl.storage.files.SETTLE_S", 0.3)
    return f"s3://runs/{uuid.uuid4().hex}?scheme=http&endpoint_override={server}&region=us-east-1"


def test_files(uri: str) -> None:
    storage = Storage(uri).inside("folder")
    assert storage.names("commits") == []
    assert not storage.exists("commits/a")
    storage.write("commits/a", b"one")
    storage.write("commits/a", b"two")
    storage.write("commits/b", b"")
    assert storage.read("commits/a") == b"two"
    assert storage.sizes("commits") == {"a": 3, "b": 0}
    assert storage.digest("commits/a") == "3fc4ccfe745870e2c0d99f71f30ff0656c8dedd41cc1d7d3d376b0dbe685e2f3"
    assert abs(storage.modified("commits/a") - time.time()) < 60
    storage.delete("commits/a")
    storage.delete("commits/a")
    assert storage.names("commits") == ["b"]
    for read in (storage.read, storage.digest, storage.modified):
        with pytest.raises(FileNotFoundError):
            read("commits/a")
    with pytest.raises(RunError):
        storage.write("../outside", b"x")


def test_a_file_is_created_once(uri: str) -> None:
    storage = Storage(uri)
    assert storage.create("a", b"mine")
    assert not storage.create("a", b"other")
    assert storage.read("a") == b"mine"


@pytest.mark.slow
def test_a_server_that_is_not_there_is_named(uri: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = f"127.0.0.1:{unused.getsockname()[1]}"
    address = f"s3://runs/x?scheme=http&endpoint_override={gone}&region=us-east-1"
    with pytest.raises(RunError, match="cannot write runs/x/file"):
        Storage(address).write("file", b"x")


def test_the_lease(uri: str) -> None:
    storage = Storage(uri)
    with Lease(storage, 90) as mine:
        mine.check()
        with pytest.raises(RunError, match="is working here"):
            Lease(storage, 90).__enter__()
    assert read_lease(storage) is None
    storage.write(FILE, Holder.here().model_copy(update={"host": "elsewhere"}).model_dump_json().encode())
    with pytest.raises(RunError, match="on elsewhere is working here"):
        Lease(storage, 90).__enter__()
    time.sleep(2.1)  # the server's times are whole seconds
    with Lease(storage, 1) as mine:
        mine.check()


def test_of_several_at_the_same_time_one_gets_the_lease(uri: str) -> None:
    winners, told = contend(Storage(uri), 3)
    assert winners == 1
    assert len(told) == 2


def experiment(uri: str, **cluster: Any) -> dict[str, Any]:
    address, _, options = uri.partition("?")
    config = small_experiment(Path("unused"), "run", "superfed-mm", **cluster)
    return config | {"storage_path": f"{address}?{options}"}


def test_a_run_is_interrupted_damaged_and_continued_to_the_same_bits(uri: str, tmp_path: Path) -> None:
    rayfl.run(small_experiment(tmp_path, "calm", "superfed-mm", backend="inline"))
    config = experiment(uri, backend="inline")
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(config, callbacks=[Interrupt(3)])
    storage = Storage(uri).inside("run")
    manifest = CommitStore(storage).latest()
    assert manifest is not None
    storage.write(f"commits/{manifest.server.name}", b"damaged")
    result = rayfl.run(config)
    assert result.rounds_completed == 4
    assert not storage.exists(FILE)
    assert verify(storage).problems == []
    calm, store = outcome(tmp_path / "calm"), CommitStore(storage)
    manifest = store.latest(thoroughly=True)
    assert manifest is not None
    assert_equal(store.read_server(manifest), calm.server)
    states = {str(client): store.read_states(file)[client] for client, file in manifest.states.items()}
    assert_equal(states, calm.states)
    for name in TABLES:
        assert from_parquet(storage.read(f"{name}.parquet")).equals(getattr(calm, name))


@pytest.mark.parametrize("first", [pytest.param("disk", marks=pytest.mark.slow), "store"])
@pytest.mark.slow
def test_the_two_copies_may_be_on_a_disk_and_on_an_object_store(first: str, uri: str, tmp_path: Path) -> None:
    rayfl.run(small_experiment(tmp_path, "calm", "scaffold", backend="inline"))
    places = [str(tmp_path), uri] if first == "disk" else [uri, str(tmp_path)]
    config = small_experiment(tmp_path, "run", "scaffold", backend="inline")
    config |= {"storage_path": places[0], "storage": {"copies": 2, "copies_path": places[1]}}
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(config, callbacks=[Interrupt(3)])
    storage, copy = (Storage(place).inside("run") for place in places)
    assert verify(storage).problems == []
    for number, name in enumerate(storage.names("commits")):
        (storage, copy)[number % 2].write(f"commits/{name}", b"damaged")
    assert verify(storage).problems
    rayfl.run(config)
    calm = outcome(tmp_path / "calm")
    for place in (storage, copy):
        store = CommitStore(place)
        manifest = store.latest(thoroughly=True)
        assert manifest is not None and manifest.rounds_completed == 4
        assert_equal(store.read_server(manifest), calm.server)
    assert verify(storage).problems == []


@pytest.mark.slow
def test_actors_write_to_the_store_themselves(uri: str, tmp_path: Path) -> None:
    rayfl.run(small_experiment(tmp_path, "calm", "superfed-mm", backend="inline"))
    rayfl.run(experiment(uri, num_actors=2))
    storage = Storage(uri).inside("run")
    assert verify(storage).problems == []
    for name in sorted({*TABLES, "partition"}):
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / f"{name}.parquet").write_bytes(storage.read(f"{name}.parquet"))
    (tmp_path / "copy" / "commits").mkdir()
    for name in storage.names("commits"):
        (tmp_path / "copy" / "commits" / name).write_bytes(storage.read(f"commits/{name}"))
    assert_same(outcome(tmp_path / "calm"), outcome(tmp_path / "copy"))
