"""Writes the server's tree of each commit, and of its parts those alone that have changed."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rayfl.params import Tree, from_leaves, leaves, num_bytes
from rayfl.storage.commits import CommitStore
from rayfl.storage.manifest import Manifest, StoredFile
from rayfl.storage.server_tree import parts_of, rest_of

LEAST_BYTES = 1 << 20
"""Of all parts together: less is written in one file with the rest."""


@dataclass(frozen=True)
class _Known:
    """A part as it was committed.

    Attributes:
        file: that has it.
        paths: of its leaves.
        seen: by leaf, a reference to a tensor that does not keep it, and how often it had been written to; or a number.
    """

    file: StoredFile
    paths: tuple[str, ...]
    seen: tuple[Any, ...]

    @classmethod
    def of(cls, part: Any, file: StoredFile) -> _Known:
        found = _leaves(part)
        marks = ((weakref.ref(leaf), _writes(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in found.values())
        return cls(file, tuple(found), tuple(marks))

    def is_still(self, part: Any) -> bool:
        """Returns whether a part has the same tensors, which nobody has written to, and the same numbers."""
        found = _leaves(part)
        return tuple(found) == self.paths and all(map(_same, found.values(), self.seen))


class ServerParts:
    """Knows which file has which part of the server's tree. Its methods are called from one thread."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def restore(self, manifest: Manifest, tree: Tree) -> None:
        """Takes over from a commit, of which this tree was read."""
        found = dict(parts_of(tree))
        self._known = {
            path: _Known.of(found[path], file) for path, file in manifest.server_parts.items() if path in found
        }

    def write(self, store: CommitStore, rounds: int, tree: Tree) -> tuple[StoredFile, dict[str, StoredFile]]:
        """Writes what has changed since the last commit.

        A file of which less than half is still needed is given up: its parts are written again.

        Args:
            store: where to.
            rounds: completed ones.
            tree: the server's.

        Returns:
            The file of the rest, and by path the files of the parts; none where all is in the first.
        """
        found = dict(parts_of(tree))
        sizes = {path: part.nbytes if isinstance(part, Tensor) else num_bytes(part) for path, part in found.items()}
        if sum(sizes.values()) < LEAST_BYTES:
            self._known = {}
            return store.write_server(rounds, tree), {}
        kept = {path: one.file for path, one in self._known.items() if path in found and one.is_still(found[path])}
        needed = Counter[str]()
        for path, file in kept.items():
            needed[file.name] += sizes[path]
        kept = {path: file for path, file in kept.items() if 2 * needed[file.name] >= file.size}
        rest = store.write_server(rounds, rest_of(tree, found))
        changed = {path: part for path, part in found.items() if path not in kept}
        if changed:
            kept |= dict.fromkeys(changed, store.write_server_parts(rounds, from_leaves(changed)))
        self._known = {path: _Known.of(part, kept[path]) for path, part in found.items()}
        return rest, {path: kept[path] for path in found}


def _leaves(part: Any) -> dict[str, Any]:
    return {"": part} if isinstance(part, Tensor) else dict(leaves(part, with_empty=True))


def _writes(tensor: Tensor) -> int | None:
    """How often a tensor has been written to; None if it does not count."""
    return None if tensor.is_inference() else tensor._version


def _same(leaf: Any, seen: Any) -> bool:
    if isinstance(leaf, Tensor):
        # an equal one will not do: to compare them takes as long as to write one
        return isinstance(seen, tuple) and seen[0]() is leaf and seen[1] is not None and seen[1] == _writes(leaf)
    return type(leaf) is type(seen) and leaf == seen
