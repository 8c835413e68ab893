"""What drivers that lost a run, crashes and odd disks must not be able to do to a run's folder."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
import torch

from rayfl.errors import RunError
from rayfl.results.schemas import PARTITION_KEY
from rayfl.results.tables import ResultTables
from rayfl.runs.verification import verify
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.lease import FILE, Holder, Lease, read_lease
from rayfl.storage.manifest import Manifest
from rayfl.tracking.costs import CostLines, read_costs
from rayfl.tracking.timings import Timings, read_timings
from tests.support.toys import assert_equal


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path))


def commit(store: CommitStore, rounds: int, value: float) -> Manifest:
    manifest = Manifest(
        rounds_completed=rounds,
        fingerprint="f",
        server=store.write_server(rounds, {"w": torch.tensor([value])}),
        tables={"rounds": (store.write_table(rounds, "rounds", str(value).encode()),)},
    )
    store.write_manifest(manifest)
    return manifest


def test_a_driver_that_has_lost_the_run_cannot_touch_the_files_of_the_next_ones_commit(storage: Storage) -> None:
    store = CommitStore(storage)
    manifest = commit(store, 3, 1.0)
    # The first driver, stopped for long in the midst of the same commit, goes on up to where it reads the lease.
    store.write_server(3, {"w": torch.tensor([2.0])})
    store.write_table(3, "rounds", b"other")
    assert store.latest(thoroughly=True) == manifest
    assert_equal(store.read_server(manifest), {"w": torch.tensor([1.0])})


def test_commits_of_more_than_a_million_rounds_are_in_order(storage: Storage) -> None:
    store = CommitStore(storage)
    for rounds in (999_999, 1_000_000):
        newest = commit(store, rounds, float(rounds))
    assert store.latest() == newest
    store.collect(1)
    assert store.manifests() == ["manifest-1000000.json"]
    store.drop_after(999_999)
    assert store.manifests() == []


def test_a_take_over_cut_short_on_another_machine_blocks_only_until_it_expires(storage: Storage) -> None:
    assert storage.local_path is not None
    elsewhere = Holder.here().model_copy(update={"host": "elsewhere", "pid": 7})
    storage.write(FILE, elsewhere.model_dump_json().encode())
    claim = f".lease-after-{elsewhere.token}"
    claimant = Holder.here().model_copy(update={"host": "third", "pid": 8})
    storage.write(claim, claimant.model_dump_json().encode())
    for name in (FILE, claim):
        then = (storage.local_path / name).stat().st_mtime - 100
        os.utime(storage.local_path / name, (then, then))
    with Lease(storage, 90) as mine:
        mine.check()
    assert list(storage.local_path.iterdir()) == []


def test_a_process_interrupted_while_it_takes_or_gives_back_the_lease_may_take_it_again(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt), Lease(storage, 90):
            pass
    assert read_lease(storage) is None
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), Lease(storage, 90):
        patch.setattr(threading.Thread, "join", interrupted)
    assert read_lease(storage) is None


def test_verify_reports_a_damaged_lease_with_the_rest(storage: Storage) -> None:
    commit(CommitStore(storage), 1, 1.0)
    storage.write(FILE, b"\xff")
    problems = verify(storage).problems
    assert any("lease.json is no lease of rayfl" in problem for problem in problems)
    assert any("config.yaml is missing" in problem for problem in problems)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_folders_that_cannot_be_synced_are_no_error_and_disks_that_fail_are(
    code: int, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    if code == errno.EIO:
        with pytest.raises(RunError, match=r"cannot write .*/a: Input/output error"):
            storage.write("a", b"x")
    else:
        storage.write("a", b"x")
        assert storage.read("a") == b"x"


@pytest.mark.parametrize("content", [b"{", b"[]\n", b"3\n", b'{"round": "x"}\n', b"\xff\n"])
def test_damaged_timings_do_not_keep_a_run_from_going_on(
    content: bytes, storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    storage.write("timings.jsonl", content)
    timings = Timings(storage)
    timings.on_start(None)  # type: ignore[arg-type]
    assert "timings.jsonl" in caplog.text
    timings.on_phases(1, {"server": 0.5})
    assert read_timings(storage) == [{"round": 1, "server": 0.5}]


def test_lines_of_a_round_are_there_before_its_commit(storage: Storage) -> None:
    """Whenever the process is killed, no commit has a round without its line."""
    ours = True
    timings = Timings(storage, 2, lambda: ours)
    costs = CostLines(storage, lambda: (3, 10.0), 2, lambda: ours)
    for listener in (timings, costs):
        listener.on_start(None)  # type: ignore[arg-type]
    for round in (1, 2, 3):
        timings.on_phases(round, {"server": 0.5})
        costs.on_costs(round, {"client_seconds": 0.1})
        if round == 2:
            costs.on_commit(2)
        written = round // 2 * 2  # of every second round there is a commit
        assert [line["round"] for line in read_timings(storage)] == list(range(1, written + 1))
        assert [line["round"] for line in read_costs(storage)] == list(range(1, written + 1))
    costs.on_costs(4, {"client_seconds": 0.1})
    assert read_costs(storage)[1] == {"round": 2, "client_seconds": 0.1, "states": 3, "state_mean_bytes": 10.0}
    ours = False  # another driver has taken the run over
    costs.on_costs(6, {"client_seconds": 0.1})
    costs.on_end(6)
    assert len(read_costs(storage)) == 4


def test_tables_of_a_long_run_do_not_fall_into_small_pieces() -> None:
    tables = ResultTables(["a", "b"], None, "hash")
    for round in range(1, 301):
        tables.add_skipped(round, {1: ("local_update", "made up")})
    assert tables.skipped.num_rows == 300
    assert tables.skipped.column("round").num_chunks <= 65
    assert tables.skipped.column("round").to_pylist() == list(range(1, 301))
    assert tables.skipped.schema.metadata[PARTITION_KEY] == b"hash"
