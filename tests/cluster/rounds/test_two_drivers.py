"""Two drivers on one run's folder: the second is refused while the first lives, and none overwrites the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import rayfl
from rayfl.errors import RunError
from rayfl.params import Tree
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.lease import FILE, Holder
from rayfl.storage.manifest import StoredFile
from tests.support.experiments import assert_same, outcome, small_experiment

ROOT = Path(__file__).parents[3]


@contextmanager
def driver_at_work(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver in a process of its own that waits after its second round."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(small_experiment(tmp_path, "run", "scaffold", backend="inline")))
    process = subprocess.Popen(
        [sys.executable, "tests/support/waiting_run.py", str(config), "2", str(tmp_path / "go")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_second_driver_is_refused_and_does_not_disturb_the_first(tmp_path: Path, calm: Path) -> None:
    second = small_experiment(tmp_path, "run", "scaffold", backend="inline")
    with driver_at_work(tmp_path) as first:
        with pytest.raises(RunError, match=rf"process {first.pid} on .* is working here"):
            rayfl.run(second)
        (tmp_path / "go").touch()
        assert first.wait(60) == 0
    assert not (tmp_path / "run" / FILE).exists()
    assert_same(outcome(calm), outcome(tmp_path / "run"))
    assert rayfl.run(second).rounds_completed == 4


@pytest.mark.slow
def test_after_kill_9_a_new_driver_goes_on_at_once(tmp_path: Path, calm: Path) -> None:
    with driver_at_work(tmp_path) as first:
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert (tmp_path / "run" / FILE).exists()
        result = rayfl.run(small_experiment(tmp_path, "run", "scaffold", backend="inline"))
    assert result.rounds_completed == 4
    assert_same(outcome(calm), outcome(tmp_path / "run"))


class TakeOver(rayfl.Callback):
    """After a round, somebody else has the lease."""

    def __init__(self, folder: Path, after: int) -> None:
        self._folder = folder
        self._after = after

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        if rounds_completed == self._after:
            other = Holder.here().model_copy(update={"host": "elsewhere", "pid": 7})
            Storage(str(self._folder)).write(FILE, other.model_dump_json().encode())


def test_a_driver_whose_lease_was_taken_over_commits_nothing_more(tmp_path: Path, calm: Path) -> None:
    config = small_experiment(tmp_path, "run", "scaffold", backend="inline")
    folder = tmp_path / "run"
    with pytest.raises(RunError, match="taken over by process 7 on elsewhere"):
        rayfl.run(config, callbacks=[TakeOver(folder, after=2)])
    manifest = CommitStore(Storage(str(folder))).latest()
    assert manifest is not None
    # the commit of round 2 may have been under way
    assert manifest.rounds_completed <= 2
    assert "elsewhere" in (folder / FILE).read_text()
    with pytest.raises(RunError, match="process 7 on elsewhere is working here"):
        rayfl.run(config)
    (folder / FILE).unlink()
    rayfl.run(config)
    assert_same(outcome(calm), outcome(folder))


def test_a_commit_during_which_the_lease_is_taken_over_is_not_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, write_server = tmp_path / "run", CommitStore.write_server

    def taken_over(self: CommitStore, rounds_completed: int, tree: Tree) -> StoredFile:
        TakeOver(folder, after=2).on_round(rounds_completed, [], 0.0)
        return write_server(self, rounds_completed, tree)

    monkeypatch.setattr(CommitStore, "write_server", taken_over)
    with pytest.raises(RunError, match="taken over by process 7 on elsewhere"):
        rayfl.run(small_experiment(tmp_path, "run", "scaffold", backend="inline"))
    manifest = CommitStore(Storage(str(folder))).latest()
    assert manifest is not None and manifest.rounds_completed == 1


class Overtaken(rayfl.Callback):
    """After a round, the lease is deleted, and what the driver has written by then is replaced or moved away."""

    def __init__(self, folder: Path, moved: Path | None = None) -> None:
        self._folder = folder
        self._moved = moved

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        if rounds_completed == 3:  # no commit is under way
            (self._folder / FILE).unlink()
            for name in ("timings.jsonl", "costs.jsonl"):
                (self._folder / name).write_text("of another driver")
            if self._moved is not None:
                self._folder.rename(self._moved)


def test_a_driver_that_was_forced_out_writes_nothing_more(tmp_path: Path) -> None:
    for name, moved in (("run", None), ("other", tmp_path / "moved")):
        folder = tmp_path / name
        config = small_experiment(tmp_path, name, "scaffold", backend="inline") | {"storage": {"commit_every": 2}}
        with pytest.raises(RunError, match="has lost its lease"):
            rayfl.run(config, callbacks=[Overtaken(folder, moved)])
        place = moved or folder
        assert {(place / file).read_text() for file in ("timings.jsonl", "costs.jsonl")} == {"of another driver"}
        assert moved is None or not folder.exists()


def test_a_driver_on_another_machine_has_until_its_lease_expires(tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "run", "scaffold", backend="inline")
    lease = tmp_path / "run" / FILE
    lease.parent.mkdir()
    lease.write_text(Holder.here().model_copy(update={"host": "elsewhere"}).model_dump_json())
    os.utime(lease, (lease.stat().st_mtime - 30,) * 2)
    with pytest.raises(RunError, match="on elsewhere"):
        rayfl.run(config)
    assert sorted(path.name for path in lease.parent.iterdir()) == [FILE]
    assert rayfl.run(config | {"storage": {"lease_timeout_s": 20}}).rounds_completed == 4
