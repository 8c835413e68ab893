"""Holds the states of one host's clients, in memory or spilled to disk, and writes them for commits."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from actors.hosting.memory import Lookups, Spill, SpillHandle
from rayfl.params import Tree, from_numpy, leaves, map_leaves, own_dicts, tensors, to_numpy
from rayfl.storage.commits import CommitStore
from rayfl.storage.manifest import StoredFile

STATE_FILE_BYTES = 16 << 20
"""Approximate bytes of a file, which contains states of several clients; writing it takes twice this memory."""

Change = tuple[int, int]
"""When a state changed: (round, number of the client's moves between hosts until then); the later is the greater."""


class ClientStates:
    """Client states of one host.

    Trees are replaced and never changed in place, so that a commit can write a tree while the next round runs.
    ``write`` runs on a thread of its own.

    Args:
        store: store of commits; None if nothing is committed.
        host: number of the host, part of its files' names.
        spill: store of the trees; default without a limit of memory.
        commit_every: rounds from one commit to the next; only the last state between two commits is written.

    Attributes:
        lookups: counts how often a state was in memory when it was needed.
    """

    def __init__(self, store: CommitStore | None, host: int, spill: Spill | None = None, commit_every: int = 1) -> None:
        self._store = store
        self._host = host
        self._commit_every = commit_every
        self._spill = spill or Spill()
        self.lookups = Lookups()
        self._states: dict[int, SpillHandle] = {}
        self._moves: dict[int, int] = {}
        # What commits have to write, by the number of commits before it and by client.
        self._changed: dict[int, dict[int, tuple[Change, SpillHandle]]] = {}
        self._lock = threading.Lock()

    def checkout(self, client: int) -> Tree:
        """Returns a copy of the client's state (tensors are shared) for a procedure; empty before the first."""
        kept = self._states.get(client)
        if kept is None:
            return {}
        self.lookups.note(kept.tree is not None)
        return own_dicts(self._spill.get(kept))

    def handle(self, client: int) -> SpillHandle | None:
        """Returns the handle of a client's state, a new one for each new state; None without a state."""
        return self._states.get(client)

    def holds(self, client: int) -> bool:
        """Returns whether this host has the client's state, in memory or spilled."""
        return client in self._states

    def replace(self, client: int, state: Tree, round: int) -> None:
        """Stores the state that a procedure has left in a round (0-indexed)."""
        on_cpu = map_leaves(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, state)
        kept = self._spill.store(_compact(on_cpu))
        with self._lock:
            self._states[client] = kept
            if self._store is None:
                return  # nobody writes it: what this state replaces is freed now
            change = (round, self._moves.get(client, 0))
            self._changed.setdefault(round // self._commit_every, {})[client] = (change, kept)

    def release(self, clients: Iterable[int]) -> dict[int, Tree]:
        """Removes states, to be moved to another host, as NumPy arrays; this host still writes their commit.

        Returns:
            The argument of :meth:`receive`: by client ``state`` and ``moves``, the number of the client's moves.
        """
        return {
            client: {"state": self._released(client), "moves": self._moves.pop(client, 0) + 1} for client in clients
        }

    def _released(self, client: int) -> Tree:
        return to_numpy(self._spill.get(self._states.pop(client)))

    def receive(self, states: Mapping[int, Tree]) -> None:
        """Stores states that another host released."""
        for client, moved in states.items():
            self._states[client] = self._spill.store(from_numpy(moved["state"]))
            self._moves[client] = moved["moves"]

    def restore(self, files: Mapping[int, StoredFile]) -> None:
        """Loads committed states of clients whose state this host does not have."""
        missing = {client: file for client, file in files.items() if client not in self._states}
        if not missing:
            return
        if self._store is None:
            raise RuntimeError("states can only be restored from a store")
        by_file: dict[StoredFile, list[int]] = {}
        for client, file in missing.items():
            by_file.setdefault(file, []).append(client)
        for file, clients in by_file.items():
            found = self._store.read_states(file)
            self._states.update({client: self._spill.store(found[client]) for client in clients})

    def write(self, rounds_completed: int) -> list[tuple[StoredFile, dict[int, Change]]]:
        """Writes the states that changed before round ``rounds_completed`` and are not written yet.

        States that a later round changes meanwhile stay for the next commit.

        Returns:
            (file, time of change by client) of each file; of two hosts' states of one client the greater time is the
            newer. Empty if nothing changed.
        """
        with self._lock:
            due = sorted(window for window in self._changed if window * self._commit_every < rounds_completed)
            batches = {window: self._changed[window] for window in due}
        if self._store is None:
            return []
        newest = {client: found for batch in batches.values() for client, found in batch.items()}
        files = []
        for piece in _pieces(newest):
            # A piece bounds the memory of writing, and of reading a single client's state.
            states = {client: self._spill.peek(newest[client][1]) for client in piece}
            file = self._store.write_states(rounds_completed, self._host, states)
            files.append((file, {client: newest[client][0] for client in piece}))
        with self._lock:
            for window, batch in batches.items():
                # A rewind may have replaced the batch meanwhile.
                if self._changed.get(window) is batch:
                    del self._changed[window]
        return files

    def rewind(self) -> None:
        """Discards all states; those that are needed are restored from the last commit."""
        with self._lock:
            self._states.clear()
            self._moves.clear()
            self._changed.clear()

    def all(self) -> dict[int, Tree]:
        """Returns the states of this host, by client."""
        return {client: self._spill.peek(kept) for client, kept in sorted(self._states.items())}


class Signature:
    """Detects changes of a state without comparing values: by identity and version of its tensors.

    It holds the tensors, because the ``id`` of a deleted one may be reused.

    Args:
        state: state to compare with later.
    """

    __slots__ = ("_leaves", "_paths", "_versions")

    def __init__(self, state: Mapping[str, Any]) -> None:
        found = list(leaves(state, with_empty=True))
        self._paths, self._leaves = [path for path, _ in found], [leaf for _, leaf in found]
        self._versions = [leaf._version if isinstance(leaf, Tensor) else None for leaf in self._leaves]

    def is_other(self, state: Mapping[str, Any]) -> bool:
        """Returns whether a state differs from the original one, or a tensor was written to in place since."""
        now = Signature(state)
        return (
            now._paths != self._paths
            or now._versions != self._versions
            or not all(map(_is_same, now._leaves, self._leaves))
        )

    def written(self) -> str | None:
        """Returns the path of a tensor that has been written to in place since; None if there is none."""
        rows = zip(self._paths, self._leaves, self._versions, strict=True)
        return next((path for path, leaf, version in rows if version is not None and leaf._version != version), None)


def _is_same(leaf: Any, other: Any) -> bool:
    """Returns whether two leaves are one tensor, or equal values of one type."""
    if leaf is other or isinstance(leaf, Tensor):
        return leaf is other
    return type(leaf) is type(other) and bool(leaf == other)


def _compact(state: Tree) -> Tree:
    """Returns a state that keeps at most about twice the memory of its tensors alive, by copying some of them.

    A head that a client keeps is a view of the trained model's memory, which would stay with it, counted nowhere.
    """
    used = Counter[int]()
    for tensor in tensors(state):
        used[tensor.untyped_storage().data_ptr()] += tensor.nbytes

    def alone(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        memory = leaf.untyped_storage()
        return leaf.clone() if 2 * used[memory.data_ptr()] < memory.nbytes() else leaf

    return map_leaves(alone, state)


def _pieces(states: Mapping[int, tuple[Change, SpillHandle]]) -> Iterator[list[int]]:
    """Yields the clients, ascending, in pieces whose states fit into files of bounded size."""
    piece, size = list[int](), 0
    for client in sorted(states):
        if piece and size + states[client][1].size > STATE_FILE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(client)
        size += states[client][1].size
    if piece:
        yield piece
