"""What happens between the steps of taking and keeping a lease."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rayfl.errors import RunError
from rayfl.storage.files import Storage
from rayfl.storage.lease import FILE, Holder, Lease, read_lease


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path))


@pytest.fixture
def dead(storage: Storage) -> Holder:
    """The holder of a lease whose process is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    holder = Holder.here().model_copy(update={"pid": process.pid})
    storage.write(FILE, holder.model_dump_json().encode())
    return holder


class _Overtaken(Storage):
    """A folder in which another driver takes a dead lease over after this one has read it."""

    def create(self, path: str, data: bytes) -> bool:
        created = super().create(path, data)
        if path.startswith(".lease-after-"):
            self.write(FILE, Holder.here().model_dump_json().encode())
        return created


def test_a_lease_that_was_taken_over_since_it_was_read_is_not_replaced(storage: Storage, dead: Holder) -> None:
    with pytest.raises(RunError, match=rf"process {os.getpid()} on .* is working here"):
        Lease(_Overtaken(storage.uri), 60).__enter__()
    assert not [name for name in storage.names() if name != FILE]


def test_a_take_over_that_was_cut_short_elsewhere_blocks_until_it_is_old(storage: Storage, dead: Holder) -> None:
    name = f".lease-after-{dead.token}"
    storage.write(name, Holder.here().model_copy(update={"host": "elsewhere"}).model_dump_json().encode())
    assert storage.local_path is not None
    then = time.time() - 100
    os.utime(storage.local_path / name, (then, then))
    with Lease(storage, 90) as mine:
        mine.check()


def test_a_renewal_that_fails_is_tried_again(storage: Storage) -> None:
    failures = iter([True, True])

    class Full(Storage):
        def write(self, path: str, data: bytes) -> None:
            if path == FILE and next(failures, False):
                raise RunError("no space")
            super().write(path, data)

    with Lease(Full(storage.uri), 0.6):
        taken, begun = storage.modified(FILE), time.monotonic()
        while storage.modified(FILE) == taken and time.monotonic() < begun + 30:
            time.sleep(0.05)
        assert storage.modified(FILE) > taken
    assert next(failures, None) is None


def test_an_interrupt_right_after_a_lease_was_taken_gives_it_back(storage: Storage) -> None:
    class Interrupted(Storage):
        def create(self, path: str, data: bytes) -> bool:
            super().create(path, data)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Lease(Interrupted(storage.uri), 60).__enter__()
    assert read_lease(storage) is None


def test_a_folder_that_cannot_be_written_is_asked_about_by_the_name_of_its_option(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    wrong = Storage(str(tmp_path / "runs" / "one"))
    with pytest.raises(RunError, match=r"lease.json: .*; is storage_path a folder that you may write"):
        Lease(wrong, 60).__enter__()
