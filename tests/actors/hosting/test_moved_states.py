"""States that move between hosts, are restored from storage, and are forgotten by a rewind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from actors.hosting.state import Change, ClientStates
from rayfl.params import Tree, copy, leaves
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import StoredFile
from tests.support.state_toys import state, written
from tests.support.toys import assert_equal


@pytest.fixture
def store(tmp_path: Path) -> CommitStore:
    return CommitStore(Storage(str(tmp_path)))


def test_a_state_moves_to_another_host(store: CommitStore) -> None:
    here, there = ClientStates(store, 0), ClientStates(store, 1)
    for client in (1, 2):
        here.replace(client, state(client), 0)
    parcel = here.release([1])
    for _, leaf in leaves(parcel[1]):
        assert isinstance(leaf, np.ndarray | int)
        if isinstance(leaf, np.ndarray):
            leaf.flags.writeable = False
    there.receive(parcel)
    assert_equal(here.all(), {2: state(2.0)})
    assert here.checkout(1) == {}
    assert_equal(there.all(), {1: state(1.0)})
    there.checkout(1)["local"]["w"].add_(1.0)  # its own memory: the parcel is read-only
    assert_equal(written(store, here.write(1)), {1: state(1.0), 2: state(2.0)})
    assert there.write(1) == []


def newest(*results: list[tuple[StoredFile, dict[int, Change]]], client: int) -> StoredFile:
    """Which of several hosts' files has the client's newest state."""
    files = [found for result in results for found in result]
    return max((changes[client], file.name, file) for file, changes in files if client in changes)[2]


@pytest.mark.parametrize("round", [0, 1])
def test_of_two_hosts_that_changed_a_client_the_later_is_told(store: CommitStore, round: int) -> None:
    """Also within one round, in which a method may call the same client twice."""
    here, there = ClientStates(store, 0), ClientStates(store, 1)
    here.replace(1, state(1.0), 0)
    there.receive(here.release([1]))
    there.replace(1, state(2.0), round)
    results = [there.write(2), here.write(2)]
    assert_equal(store.read_states(newest(*results, client=1))[1], state(2.0))


def test_a_client_that_moves_there_and_back_within_a_round(store: CommitStore) -> None:
    here, there = ClientStates(store, 0), ClientStates(store, 1)
    here.replace(1, state(1.0), 0)
    there.receive(here.release([1]))
    there.replace(1, state(2.0), 0)
    here.receive(there.release([1]))
    unchanged = (here.write(0), there.write(0))
    assert unchanged == ([], [])
    here.replace(1, state(3.0), 0)
    results = [there.write(1), here.write(1)]
    assert_equal(store.read_states(newest(*results, client=1))[1], state(3.0))


def test_a_client_that_comes_back_unchanged(store: CommitStore) -> None:
    here, there = ClientStates(store, 0), ClientStates(store, 1)
    here.replace(1, state(1.0), 0)
    there.receive(here.release([1]))
    there.replace(1, state(2.0), 0)
    here.receive(there.release([1]))
    results = [here.write(1), there.write(1)]
    assert_equal(store.read_states(newest(*results, client=1))[1], state(2.0))
    assert_equal(here.checkout(1), state(2.0))


def test_states_are_restored_where_they_are_needed(store: CommitStore) -> None:
    before = ClientStates(store, 0)
    for client in (1, 2, 3):
        before.replace(client, state(client), 0)
    [(file, _)] = before.write(1)
    after = ClientStates(store, 1)
    after.replace(2, state(20.0), 1)
    after.restore(dict.fromkeys((1, 2), file))
    assert_equal(after.all(), {1: state(1.0), 2: state(20.0)})
    assert_equal(written(store, after.write(2)), {2: state(20.0)})


def test_a_file_is_read_once_for_all_its_clients(store: CommitStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ClientStates(store, 0)
    for client in (1, 2):
        before.replace(client, state(client), 0)
    first = before.write(1)
    before.replace(3, state(3.0), 1)
    second = before.write(2)
    reads: list[str] = []
    read_states = CommitStore.read_states

    def watched(self: CommitStore, file: StoredFile) -> dict[int, Tree]:
        reads.append(file.name)
        return read_states(self, file)

    monkeypatch.setattr(CommitStore, "read_states", watched)
    after = ClientStates(store, 1)
    after.restore({1: first[0][0], 2: first[0][0], 3: second[0][0]})
    after.restore({1: first[0][0]})
    assert sorted(reads) == [first[0][0].name, second[0][0].name]
    assert_equal(after.all(), {k: state(k) for k in (1, 2, 3)})


def test_restoring_needs_a_store() -> None:
    states = ClientStates(None, 0)
    states.restore({})
    with pytest.raises(RuntimeError, match="store"):
        states.restore({1: StoredFile(name="x", sha256="y")})


def test_a_rewind_forgets_states_and_changes(store: CommitStore) -> None:
    states = ClientStates(store, 0)
    states.replace(1, state(1.0), 0)
    [(file, _)] = states.write(1)
    states.replace(1, state(2.0), 1)
    states.replace(2, state(2.0), 1)
    states.rewind()
    assert states.all() == {}
    assert states.checkout(1) == {}
    assert states.write(2) == []
    states.restore({1: file})
    assert_equal(states.checkout(1), state(1.0))
    states.replace(1, state(5.0), 1)
    again = states.write(2)
    assert again[0][1] == {1: (1, 0)}
    assert_equal(written(store, again), {1: state(5.0)})


def test_states_are_copied_only_when_they_travel() -> None:
    states = ClientStates(None, 0)
    original = state(1.0)
    states.replace(1, original, 0)
    assert states.all()[1]["local"]["w"].data_ptr() == original["local"]["w"].data_ptr()
    expected = copy(original)
    other = ClientStates(None, 1)
    other.receive(states.release([1]))
    original["local"]["w"].fill_(7.0)
    assert_equal(other.checkout(1), expected)
