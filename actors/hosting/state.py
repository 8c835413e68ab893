"""The states of the clients one host holds: in memory, in waiting for a commit, or still on storage."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from actors.hosting.memory import Lookups, Spill, SpillHandle
from rayfl.params import Tree, from_numpy, leaves, map_leaves, own_dicts, to_numpy
from rayfl.storage.commits import CommitStore
from rayfl.storage.manifest import StoredFile

_FILE_BYTES = 16 << 20
"""States of several clients share a file of about this size, which while it is written is in memory twice more."""

Change = tuple[int, int]
"""When a state changed: the round, and how often the client had moved between hosts by then. Later is greater."""


class ClientStates:
    """Client states of one host.

    Trees are replaced, never changed in place, so a tree waiting for a commit stays what it was while the next
    round goes on. ``write`` runs on another thread than the rest.

    Args:
        store: where commits go; None keeps nothing.
        host: the host's number, part of its files' names.
        spill: holds the trees; default without a limit.
        commit_every: rounds from one commit to the next; of a client's states between two commits only the last is
            kept.

    Attributes:
        lookups: how often a state that was checked out was in memory.
    """

    def __init__(self, store: CommitStore | None, host: int, spill: Spill | None = None, commit_every: int = 1) -> None:
        self._store = store
        self._host = host
        self._commit_every = commit_every
        self._spill = spill or Spill()
        self.lookups = Lookups()
        self._states: dict[int, SpillHandle] = {}
        self._moves: dict[int, int] = {}
        # By the number of commits before it, and client: what the next commit writes.
        self._changed: dict[int, dict[int, tuple[Change, SpillHandle]]] = {}
        self._lock = threading.Lock()

    def checkout(self, client: int) -> Tree:
        """A copy of the client's state (tensors shared) for a procedure to work on; empty at first."""
        kept = self._states.get(client)
        if kept is None:
            return {}
        self.lookups.note(kept.tree is not None)
        return own_dicts(self._spill.get(kept))

    def handle(self, client: int) -> SpillHandle | None:
        """Returns what is kept of a client's state; another object whenever the state is another."""
        return self._states.get(client)

    def holds(self, client: int) -> bool:
        """Returns whether the client's state is here, in memory or spilled."""
        return client in self._states

    def replace(self, client: int, state: Tree, round: int) -> None:
        """Keeps what a procedure made of its state in a round (0-indexed)."""
        kept = self._spill.store(
            map_leaves(lambda leaf: leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf, state)
        )
        with self._lock:
            self._states[client] = kept
            change = (round, self._moves.get(client, 0))
            self._changed.setdefault(round // self._commit_every, {})[client] = (change, kept)

    def release(self, clients: Iterable[int]) -> dict[int, Tree]:
        """Gives states away to another host, as NumPy arrays; their commit is still this host's to write.

        Returns:
            For :meth:`receive`, by client: ``state``, and ``moves``, how often the client has moved.
        """
        return {
            client: {"state": self._released(client), "moves": self._moves.pop(client, 0) + 1} for client in clients
        }

    def _released(self, client: int) -> Tree:
        return to_numpy(self._spill.get(self._states.pop(client)))

    def receive(self, states: Mapping[int, Tree]) -> None:
        """Takes over what another host released."""
        for client, moved in states.items():
            self._states[client] = self._spill.store(from_numpy(moved["state"]))
            self._moves[client] = moved["moves"]

    def restore(self, files: Mapping[int, StoredFile]) -> None:
        """Loads committed states of clients this host does not hold yet."""
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
        """Writes what changed in the rounds before ``rounds_completed`` and is not written yet.

        A later round may be changing states meanwhile; those stay for the next commit.

        Returns:
            The files, and for each by client when its state in it is from: of two hosts' states of one client the
            greater is the newer. None at all if nothing changed.
        """
        with self._lock:
            due = sorted(window for window in self._changed if window * self._commit_every < rounds_completed)
            batches = {window: self._changed[window] for window in due}
        if self._store is None:
            return []
        newest = {client: found for batch in batches.values() for client, found in batch.items()}
        files = []
        for piece in _pieces(newest):
            # What is in memory at a time, and what has to be read for the sake of one client, is a piece.
            states = {client: self._spill.get(newest[client][1]) for client in piece}
            file = self._store.write_states(rounds_completed, self._host, states)
            files.append((file, {client: newest[client][0] for client in piece}))
        with self._lock:
            for window, batch in batches.items():
                # Not what came after a rewind in the meantime.
                if self._changed.get(window) is batch:
                    del self._changed[window]
        return files

    def rewind(self) -> None:
        """Forgets everything since and including the last commit: what is needed is restored from storage."""
        with self._lock:
            self._states.clear()
            self._moves.clear()
            self._changed.clear()

    def all(self) -> dict[int, Tree]:
        """The states of this host, by client."""
        return {client: self._spill.get(kept) for client, kept in sorted(self._states.items())}


class Signature:
    """Tells a changed state from an unchanged one without comparing values: by identity and version of tensors.

    It holds the tensors, since the ``id`` of one that is gone may be given to the next.

    Args:
        state: the state as it is now.
    """

    __slots__ = ("_leaves", "_paths", "_versions")

    def __init__(self, state: Mapping[str, Any]) -> None:
        found = list(leaves(state))
        self._paths, self._leaves = [path for path, _ in found], [leaf for _, leaf in found]
        self._versions = [leaf._version if isinstance(leaf, Tensor) else None for leaf in self._leaves]

    def is_other(self, state: Mapping[str, Any]) -> bool:
        """Returns whether a state is not the one that this is of, or has been written to since."""
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


def _pieces(states: Mapping[int, tuple[Change, SpillHandle]]) -> Iterator[list[int]]:
    """The clients, ascending, in pieces whose states make up files of bounded size."""
    piece, size = list[int](), 0
    for client in sorted(states):
        if piece and size + states[client][1].size > _FILE_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(client)
        size += states[client][1].size
    if piece:
        yield piece
