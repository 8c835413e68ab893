"""One driver at a time on a run's folder."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from rayfl.errors import RunError
from rayfl.storage import lease
from rayfl.storage.files import Storage
from rayfl.storage.lease import FILE, Holder, Lease, read_lease

ROOT = Path(__file__).parents[2]


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path))


def left_by(storage: Storage, age_s: float = 0.0, **changes: Any) -> Holder:
    """A lease that somebody else left behind."""
    holder = Holder.here().model_copy(update=changes)
    storage.write(FILE, holder.model_dump_json().encode())
    then = time.time() - age_s
    assert storage.local_path is not None
    os.utime(storage.local_path / FILE, (then, then))
    return holder


@pytest.fixture
def ended() -> int:
    """The id of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def zombie() -> Iterator[int]:
    """A process that is over, but not yet waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()
    time.sleep(0.2)
    yield process.pid
    process.wait()


def test_the_second_is_refused_while_the_first_lives_and_may_come_after_it(storage: Storage) -> None:
    with Lease(storage, 90) as held:
        held.check()
        with pytest.raises(RunError, match=rf"process {os.getpid()} on .* is working here .*wait for it"):
            Lease(storage, 90).__enter__()
        held.check()
    assert storage.names("commits") == []
    assert not storage.exists(FILE)
    with Lease(storage, 90):
        pass


def test_a_lease_is_given_back_after_an_error_too(storage: Storage) -> None:
    with pytest.raises(KeyboardInterrupt), Lease(storage, 90):
        raise KeyboardInterrupt
    assert not storage.exists(FILE)


def test_the_lease_of_a_process_that_is_gone_is_taken_over_at_once(storage: Storage, ended: int) -> None:
    left_by(storage, pid=ended)
    with Lease(storage, 90) as mine:
        mine.check()
    assert storage.local_path is not None
    assert list(storage.local_path.iterdir()) == []


def test_the_lease_of_a_zombie_is_taken_over_at_once(storage: Storage, zombie: int) -> None:
    assert Holder.here().model_copy(update={"pid": zombie}).is_alive() is False
    left_by(storage, pid=zombie)
    with Lease(storage, 90) as mine:
        mine.check()


@pytest.mark.parametrize(
    "changes", [{"boot": "of before the machine was restarted"}, {"started": "1"}], ids=["restarted", "pid reused"]
)
def test_a_process_of_the_same_number_is_not_taken_for_the_holder(storage: Storage, changes: dict[str, str]) -> None:
    left_by(storage, **changes)
    with Lease(storage, 90) as mine:
        mine.check()


@pytest.mark.parametrize(
    "changes", [{"host": "elsewhere"}, {"namespace": "pid:[1]"}], ids=["another machine", "another container"]
)
def test_a_holder_that_cannot_be_seen_has_until_its_lease_expires(storage: Storage, changes: dict[str, Any]) -> None:
    left_by(storage, age_s=60, pid=1, **changes)
    with pytest.raises(RunError, match=r"process 1 on .*last sign of life 6\d s ago.*wait [23]\d s and try again"):
        Lease(storage, 90).__enter__()
    with Lease(storage, 30) as mine:
        mine.check()


@pytest.fixture
def ray_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has this process be that of a Ray job."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")


@pytest.mark.parametrize(
    "changes", [{"host": "elsewhere"}, {"namespace": "pid:[1]"}], ids=["another machine", "another container"]
)
def test_a_job_waits_until_a_lease_that_its_lost_pod_left_expires(
    storage: Storage, ray_job: None, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    left_by(storage, pid=1, **changes)
    before = time.monotonic()
    with caplog.at_level("WARNING", "rayfl"), Lease(storage, 1.2) as mine:
        mine.check()
    assert 0.9 < time.monotonic() - before < 10
    assert len(caplog.records) == 1


def test_whoever_is_told_to_wait_waits_as_a_job_does(storage: Storage) -> None:
    left_by(storage, pid=1, host="elsewhere")
    with pytest.raises(RunError, match="is working here"), Lease(storage, 0.8):
        pass
    with Lease(storage, 0.8, waits=True) as mine:
        mine.check()


@pytest.mark.parametrize("renewed", [True, False], ids=["it is renewed", "another job has taken it"])
def test_a_job_waits_no_longer_than_until_the_holder_is_seen_to_live(
    storage: Storage, ray_job: None, renewed: bool
) -> None:
    holder = left_by(storage, host="elsewhere", pid=1)
    later = {"heartbeat": time.time() + 5} if renewed else {"token": "0" * 32}
    renewal = threading.Timer(0.3, lambda: left_by(storage, **holder.model_dump() | later))
    renewal.start()
    before = time.monotonic()
    with pytest.raises(RunError, match="process 1 on elsewhere is working here"):
        Lease(storage, 5).__enter__()
    assert time.monotonic() - before < 4
    renewal.join()


def test_a_job_takes_at_once_what_a_living_holder_gives_back(storage: Storage, ray_job: None) -> None:
    left_by(storage, host="elsewhere", pid=1)
    end = threading.Timer(0.3, storage.delete, [FILE])
    end.start()
    before = time.monotonic()
    with Lease(storage, 5) as mine:
        mine.check()
    assert time.monotonic() - before < 4
    end.join()


def test_a_job_is_refused_at_once_where_the_holder_is_seen_to_live(storage: Storage, ray_job: None) -> None:
    left_by(storage)
    before = time.monotonic()
    with pytest.raises(RunError, match="end that process"):
        Lease(storage, 90).__enter__()
    assert time.monotonic() - before < 10


def test_a_holder_that_is_seen_to_live_keeps_its_lease_however_long_it_is_silent(storage: Storage) -> None:
    left_by(storage, age_s=10_000)
    with pytest.raises(RunError, match="end that process"):
        Lease(storage, 1).__enter__()


def test_without_proc_a_process_that_is_there_is_unknown_and_one_that_is_not_is_dead(
    ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "PROC", tmp_path)
    here = Holder.here()
    assert (here.boot, here.started, here.namespace) == ("", "", "")
    assert here.is_alive() is None
    assert here.model_copy(update={"pid": ended}).is_alive() is False


def test_a_lease_is_renewed(storage: Storage) -> None:
    with Lease(storage, 1.2):
        before = read_lease(storage)
        time.sleep(0.7)
        after = read_lease(storage)
    assert before is not None
    assert after is not None
    assert before.token == after.token
    assert before.heartbeat < after.heartbeat


def test_who_has_lost_the_lease_notices_and_leaves_the_new_holders_alone(storage: Storage) -> None:
    with Lease(storage, 0.6) as mine:
        other = left_by(storage, host="elsewhere", pid=7)
        time.sleep(0.4)  # time to renew, which must not happen
        with pytest.raises(RunError, match=r"taken over by process 7 on elsewhere, .* commits nothing more"):
            mine.check()
    assert read_lease(storage) == other
    storage.delete(FILE)
    with pytest.raises(RunError, match="the file is gone"):
        mine.check()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"token": "../../x"}'])
def test_a_file_that_is_no_lease_is_named(storage: Storage, content: bytes) -> None:
    storage.write(FILE, content)
    with pytest.raises(RunError, match=r"lease.json is no lease.*delete it"):
        Lease(storage, 90).__enter__()


def contend(storage: Storage, contenders: int) -> tuple[int, list[str]]:
    """How many of several got the lease at the same time, and what the others were told."""
    barrier, won, told = threading.Barrier(contenders), [], []
    done = threading.Event()

    def one() -> None:
        barrier.wait()
        try:
            with Lease(storage, 90):
                won.append(1)
                done.wait(20)
        except RunError as error:
            told.append(str(error))

    threads = [threading.Thread(target=one) for _ in range(contenders)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 20
    while len(won) + len(told) < contenders and time.monotonic() < until:
        time.sleep(0.01)
    winners = len(won)
    done.set()
    for thread in threads:
        thread.join()
    return winners, told


@pytest.mark.parametrize("left", [False, True], ids=["free", "left by a dead process"])
def test_of_several_at_the_same_time_one_gets_it(storage: Storage, left: bool, ended: int) -> None:
    for _ in range(5):
        if left:
            left_by(storage, pid=ended)
        winners, told = contend(storage, 4)
        assert winners == 1
        assert len(told) == 3
        assert storage.local_path is not None
        assert list(storage.local_path.iterdir()) == []


def no_links(*_: object) -> None:
    raise OSError(errno.EPERM, "not supported here")


def test_of_several_at_the_same_time_one_gets_it_where_there_are_no_links(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr("rayfl.storage.files.SETTLE_S", 0.5)
    winners, told = contend(storage, 4)
    assert winners == 1
    assert len(told) == 3


def test_a_take_over_that_was_cut_short_does_not_block(storage: Storage, ended: int) -> None:
    dead = left_by(storage, pid=ended)
    claim = Holder.here().model_copy(update={"pid": ended})
    storage.write(f".lease-after-{dead.token}", claim.model_dump_json().encode())
    with Lease(storage, 90) as mine:
        mine.check()


def test_killed_with_its_process(tmp_path: Path, storage: Storage) -> None:
    script = (
        "import sys, time\nfrom rayfl.storage.lease import Lease\nfrom rayfl.storage.files import Storage\n"
        "with Lease(Storage(sys.argv[1]), 90):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(RunError, match=f"process {process.pid} on"):
        Lease(storage, 90).__enter__()
    process.send_signal(signal.SIGKILL)
    process.wait()
    with Lease(storage, 90) as mine:
        mine.check()


def test_times_are_those_of_the_storage(storage: Storage) -> None:
    storage.write("a", b"")
    assert abs(storage.modified("a") - time.time()) < 60
    with pytest.raises(FileNotFoundError):
        storage.modified("b")
    assert isinstance(storage._located[0], fs.LocalFileSystem)
