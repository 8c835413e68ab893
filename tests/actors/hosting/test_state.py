"""Client states on a host: isolation, commits, and what counts as a change."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.hosting.state import ClientStates, Signature
from rayfl.errors import RunError
from rayfl.params import num_bytes
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import StoredFile
from tests.support.state_toys import changes, state, written
from tests.support.toys import assert_equal


@pytest.fixture
def store(tmp_path: Path) -> CommitStore:
    return CommitStore(Storage(str(tmp_path)))


def test_a_client_begins_with_an_empty_state() -> None:
    states = ClientStates(None, 0)
    assert states.checkout(3) == {}
    assert states.all() == {}


def test_a_procedure_works_on_a_copy_of_its_own() -> None:
    states = ClientStates(None, 0)
    states.replace(3, state(1.0), 0)
    mine = states.checkout(3)
    mine["local"]["w"] = torch.zeros(2)
    mine["local"]["v"] = torch.zeros(1)
    mine["selections"] = 9
    del mine["local"]
    mine["new"] = torch.ones(1)
    assert_equal(states.checkout(3), state(1.0))


def test_what_is_kept_does_not_follow_the_callers_dict() -> None:
    states = ClientStates(None, 0)
    mine = state(1.0)
    states.replace(3, mine, 0)
    mine["local"]["w"] = torch.zeros(2)
    mine["selections"] = 5
    assert_equal(states.checkout(3), state(1.0))


def test_without_commits_what_a_state_replaces_is_freed(store: CommitStore) -> None:
    def freed(commits: CommitStore | None) -> bool:
        states, first = ClientStates(commits, 0), torch.zeros(3)
        ends = weakref.ref(first.untyped_storage())
        states.replace(3, {"w": first}, 0)
        states.replace(3, {"w": torch.ones(3)}, 1)
        del first
        return ends() is None

    assert freed(None)
    assert not freed(store)  # the commit of the first round has to write it


def test_a_part_of_a_model_does_not_keep_the_memory_of_the_whole() -> None:
    states = ClientStates(None, 0)
    model = torch.arange(100.0)
    states.replace(3, {"head": model[90:].view(2, 5), "bias": model[80:90], "whole": torch.ones(4)[:3]}, 0)
    kept = states.checkout(3)
    assert_equal(kept, {"head": model[90:].view(2, 5), "bias": model[80:90], "whole": torch.ones(3)})
    assert [leaf.untyped_storage().nbytes() for leaf in kept.values()] == [40, 40, 16]


def test_tensors_are_shared_and_leave_the_graph() -> None:
    states = ClientStates(None, 0)
    weight = torch.ones(2, requires_grad=True)
    product = weight * 2
    states.replace(3, {"w": product}, 0)
    kept = states.checkout(3)["w"]
    assert not kept.requires_grad
    assert kept.data_ptr() == product.data_ptr()


def test_all_states_are_in_the_order_of_their_clients() -> None:
    states = ClientStates(None, 0)
    for client in (5, 1, 3):
        states.replace(client, state(client), 0)
    assert list(states.all()) == [1, 3, 5]
    assert_equal(states.all(), {k: state(k) for k in (1, 3, 5)})


def test_a_commit_holds_what_changed_in_the_rounds_before_it(store: CommitStore) -> None:
    states = ClientStates(store, 4)
    states.replace(1, state(1.0), 0)
    states.replace(2, state(2.0), 1)
    states.replace(3, state(3.0), 2)
    first = states.write(2)
    assert first[0][0].name.startswith("states-000002-0004")
    assert first[0][1] == {1: (0, 0), 2: (1, 0)}
    assert_equal(written(store, first), {1: state(1.0), 2: state(2.0)})
    assert states.write(2) == []
    assert_equal(written(store, states.write(3)), {3: state(3.0)})
    assert states.write(4) == []
    assert_equal(states.all(), {1: state(1.0), 2: state(2.0), 3: state(3.0)})


def test_files_of_a_commit_are_of_bounded_size(store: CommitStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.hosting.state.STATE_FILE_BYTES", 2 * num_bytes(state(0.0)))
    states = ClientStates(store, 0)
    for client in (4, 1, 2, 3, 0):
        states.replace(client, state(client), 0)
    states.replace(9, {"w": torch.ones(999)}, 0)
    files = states.write(1)
    assert [sorted(changes) for _, changes in files] == [[0, 1], [2, 3], [4], [9]]
    assert_equal(written(store, files), {**{k: state(k) for k in range(5)}, 9: {"w": torch.ones(999)}})


def test_a_client_that_changed_twice_is_committed_as_of_the_round_asked_for(store: CommitStore) -> None:
    states = ClientStates(store, 0)
    for round in range(3):
        states.replace(1, state(round), round)
    states.replace(2, state(20.0), 0)
    second = states.write(2)
    assert_equal(written(store, second), {1: state(1.0), 2: state(20.0)})
    assert second[0][1] == {1: (1, 0), 2: (0, 0)}
    assert_equal(written(store, states.write(3)), {1: state(2.0)})


def test_a_round_that_changes_a_state_twice_commits_the_later(store: CommitStore) -> None:
    states = ClientStates(store, 0)
    states.replace(1, state(1.0), 0)
    states.replace(1, state(2.0), 0)
    assert_equal(written(store, states.write(1)), {1: state(2.0)})


def test_without_a_store_nothing_is_written() -> None:
    states = ClientStates(None, 0)
    states.replace(1, state(1.0), 0)
    assert states.write(1) == []
    assert_equal(states.all(), {1: state(1.0)})


def test_a_state_that_became_empty_is_committed_as_such(store: CommitStore) -> None:
    states = ClientStates(store, 0)
    states.replace(1, state(1.0), 0)
    states.write(1)
    states.replace(1, {}, 1)
    second = states.write(2)
    other = ClientStates(store, 1)
    other.restore({1: second[0][0]})
    assert other.checkout(1) == {}
    assert list(other.all()) == [1]


def test_writing_does_not_hold_up_the_next_round(store: CommitStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread writes, another changes the same client again."""
    states = ClientStates(store, 0)
    states.replace(1, state(1.0), 0)
    writing, changed = threading.Event(), threading.Event()
    write_states = CommitStore.write_states

    def slow(self: CommitStore, *arguments: Any) -> StoredFile:
        writing.set()
        assert changed.wait(5)
        return write_states(self, *arguments)

    monkeypatch.setattr(CommitStore, "write_states", slow)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(states.write(1)))
    thread.start()
    assert writing.wait(5)
    states.replace(1, state(2.0), 1)
    changed.set()
    thread.join()
    assert_equal(written(store, results[0]), {1: state(1.0)})
    assert_equal(states.checkout(1), state(2.0))
    assert_equal(written(store, states.write(2)), {1: state(2.0)})


def test_what_changes_after_a_rewind_during_a_commit_is_left_for_the_next(
    store: CommitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = ClientStates(store, 0)
    states.replace(1, state(1.0), 0)
    write_states = CommitStore.write_states

    def rewound(self: CommitStore, *arguments: Any) -> StoredFile:
        states.rewind()
        states.replace(1, state(2.0), 0)
        return write_states(self, *arguments)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(CommitStore, "write_states", rewound)
        states.write(1)
    assert_equal(written(store, states.write(1)), {1: state(2.0)})


def test_a_failed_write_can_be_repeated(store: CommitStore, monkeypatch: pytest.MonkeyPatch) -> None:
    states = ClientStates(store, 0)
    states.replace(1, state(1.0), 0)
    states.replace(2, state(2.0), 1)

    def full(*_: Any) -> StoredFile:
        raise RunError("cannot write: No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(CommitStore, "write_states", full)
        with pytest.raises(RunError):
            states.write(1)
    states.replace(1, state(3.0), 1)
    assert_equal(written(store, states.write(2)), {1: state(3.0), 2: state(2.0)})


def test_an_untouched_state_is_unchanged() -> None:
    assert not changes(lambda state: None)
    assert not changes(lambda state: state.update(w=state["w"], n=1))
    assert not changes(lambda state: state["w"] + 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(w=torch.ones(2)),
        lambda state: state["inner"].update(v=state["inner"]["v"].clone()),
        lambda state: state["w"].add_(1),
        lambda state: state.update(n=2),
        lambda state: state.update(n=1.0),
        lambda state: state.update(n=True),
        lambda state: state.update(m=1),
        lambda state: state.update(n=torch.ones(())),
        lambda state: state.pop("w"),
        lambda state: state.clear(),
        lambda state: state.update(empty={}),
        lambda state: state["inner"].clear(),
    ],
    ids=[
        "new",
        "copy",
        "in_place",
        "number",
        "float",
        "bool",
        "added",
        "tensor",
        "removed",
        "cleared",
        "empty",
        "emptied",
    ],
)
def test_a_change_is_noticed(change: Any) -> None:
    assert changes(change)


def test_a_new_tensor_in_the_place_of_one_that_is_gone_is_a_change() -> None:
    """CPython gives the ``id`` of a freed object to the next: only a signature that holds the tensor is safe."""
    for _ in range(50):
        mine: dict[str, Tensor] = {"w": torch.ones(2)}
        before = Signature(mine)
        del mine["w"]
        mine["w"] = torch.zeros(2)
        assert before.is_other(mine)
