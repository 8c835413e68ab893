"""States and samples stay within their bounds, and come back as they were."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from actors.hosting.memory import LeastRecentlyUsed, Spill
from actors.hosting.state import ClientStates
from rayfl.errors import ResourceError
from rayfl.params import Tree
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.support.cases import ALGORITHMS, toy_of
from tests.support.cases.base import SIZES
from tests.support.toys import assert_equal


def tree(value: float, size: int = 100) -> Tree:
    """400 bytes of tensors, and a number (8 bytes)."""
    return {"model": {"w": torch.full((size,), float(value))}, "count": int(value)}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_least_recently_used_goes_first() -> None:
    gone: list[str] = []
    recent = LeastRecentlyUsed[str](10, gone.append)
    for key in ("a", "b", "c"):
        recent.touch(key, 3)
    recent.touch("a", 3)
    recent.touch("d", 3)
    assert (gone, recent.bytes) == (["b"], 9)
    recent.touch("huge", 30)
    assert (gone, recent.bytes) == (["b", "c", "a", "d"], 30)
    recent.forget("huge")
    recent.forget("huge")
    assert recent.bytes == 0


def test_spilled_trees_come_back_to_the_bit(tmp_path: Path) -> None:
    spill = Spill(1000, str(tmp_path))
    kept = [spill.store(tree(k + 0.1)) for k in range(10)]
    assert spill.held_bytes <= 1000
    assert len(files(tmp_path)) == spill.spilled == 8
    for _ in range(2):
        for k, handle in enumerate(kept):
            assert_equal(spill.get(handle), tree(k + 0.1))
            assert spill.held_bytes <= 1000
    assert len(files(tmp_path)) == spill.spilled == 10  # each is written once


def test_what_nobody_holds_leaves_memory_and_disk(tmp_path: Path) -> None:
    spill = Spill(1000, str(tmp_path))
    kept = [spill.store(tree(k)) for k in range(10)]
    del kept[1:]
    gc.collect()
    assert len(files(tmp_path)) == 1
    assert spill.held_bytes == 0
    assert_equal(spill.get(kept[0]), tree(0))
    spill.close()
    assert files(tmp_path) == []


def test_what_killed_processes_left_is_removed_and_what_living_ones_have_stays(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = socket.gethostname()
    namespace = "".join(filter(str.isdecimal, os.readlink("/proc/self/ns/pid")))
    names = {pid: f"rayfl-spill-{host}-{namespace}-{pid}-abc" for pid in (dead.pid, os.getppid())}
    # Whether these processes live cannot be known from here: of another machine, of another container.
    foreign = {f"rayfl-spill-elsewhere-{namespace}-{dead.pid}-abc", f"rayfl-spill-{host}-1{namespace}-{dead.pid}-abc"}
    for name in (*names.values(), *foreign):
        (tmp_path / name).mkdir()
    spill = Spill(1, str(tmp_path))
    kept = [spill.store(tree(k)) for k in range(2)]
    assert len(kept) == 2
    left = {path.name for path in tmp_path.iterdir()}
    assert names[dead.pid] not in left
    assert {names[os.getppid()], *foreign} < left
    assert any(name.startswith(f"rayfl-spill-{host}-{namespace}-{os.getpid()}-") for name in left)


@pytest.mark.parametrize("harm", [Path.unlink, lambda file: file.write_bytes(b"")])
def test_a_spilled_state_that_somebody_has_removed_or_damaged_is_named(
    harm: Callable[[Path], object], tmp_path: Path
) -> None:
    spill = Spill(1, str(tmp_path))
    kept = [spill.store(tree(k)) for k in range(2)]
    (file,) = files(tmp_path)
    harm(file)
    with pytest.raises(ResourceError, match=r"\.safetensors is gone or damaged .*: set cluster\.spill_dir"):
        spill.get(kept[0])


def test_without_a_limit_nothing_is_written(tmp_path: Path) -> None:
    spill = Spill(None, str(tmp_path))
    kept = [spill.store(tree(k)) for k in range(10)]
    assert (spill.held_bytes, spill.spilled, files(tmp_path)) == (10 * 408, 0, [])
    assert len(kept) == 10


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    spill = Spill(1, str(tmp_path / "missing"))
    first = spill.store(tree(0))
    with pytest.raises(ResourceError, match=r"missing: No such file or directory; raise cluster.state_memory"):
        spill.store(tree(1))
    assert_equal(spill.get(first), tree(0))


def test_a_commit_writes_states_that_were_spilled_and_those_that_were_replaced_since(tmp_path: Path) -> None:
    store = CommitStore(Storage(str(tmp_path / "run")))
    states = ClientStates(store, 0, Spill(500, str(tmp_path)))
    for client in range(6):
        states.replace(client, tree(client), round=0)
    states.replace(3, tree(33), round=1)
    [(file, _)] = states.write(1)
    found = store.read_states(file)
    for client in range(6):
        assert_equal(found[client], tree(client))
    assert_equal(states.checkout(3), tree(33))


def test_a_commit_drives_no_state_to_the_disk(tmp_path: Path) -> None:
    spill = Spill(4 * 408, str(tmp_path))
    states = ClientStates(CommitStore(Storage(str(tmp_path / "run"))), 0, spill)
    for client in range(10):
        states.replace(client, tree(client), round=0)
    before = spill.spilled, spill.held_bytes
    assert before == (6, 4 * 408)
    states.write(1)
    assert states.all().keys() == set(range(10))
    assert (spill.spilled, spill.held_bytes) == before


def test_of_the_states_between_two_commits_only_the_last_is_kept(tmp_path: Path) -> None:
    store = CommitStore(Storage(str(tmp_path / "run")))
    spill = Spill(None, str(tmp_path))
    states = ClientStates(store, 0, spill, commit_every=10)
    for round in range(9):
        states.replace(1, tree(round), round)
    gc.collect()
    assert spill.held_bytes == 408
    states.replace(2, tree(22), 9)
    states.replace(1, tree(11), 10)  # of the next commit
    [(file, changes)] = states.write(10)
    found = store.read_states(file)
    assert_equal(found[1], tree(8))
    assert_equal(found[2], tree(22))
    assert changes == {1: (8, 0), 2: (9, 0)}
    [(last, _)] = states.write(12)
    assert_equal(store.read_states(last)[1], tree(11))
    assert states.write(12) == []


def test_a_method_runs_within_little_memory_to_the_same_bits(tmp_path: Path) -> None:
    case = ALGORITHMS["superfed-mm"]
    plenty, little = toy_of(case), toy_of(case, spill=Spill(900, str(tmp_path)), data_memory=1000)
    for cohort in case.cohorts():
        assert_equal(plenty.step(cohort), little.step(cohort))
    assert little.spill is not None and little.spill.spilled >= len(SIZES)
    assert_equal(plenty.states(), little.states())
    for client, rows in plenty.scores(final=True).items():
        for row, statistics in rows.items():
            assert (little.scores(final=True)[client][row].vector == statistics.vector).all()
