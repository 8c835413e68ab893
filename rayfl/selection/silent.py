"""Clients that were asked and have never answered, and when they are asked again."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import torch

from rayfl.params import Tree

_SILENT = "silent"
_LONGEST = 30
"""Times that a client is asked in vain from which on waiting no longer doubles."""


def waiting(own: Tree, round: int) -> np.ndarray:
    """Returns the clients that are not to be asked yet, ascending, int64.

    A client that was asked n times in vain is asked again 2^n rounds later at the earliest: one that always fails then
    takes few places from others, and one that failed by chance comes back.

    Args:
        own: what :func:`with_silent` has returned.
        round: t.
    """
    clients, times, last = _columns(own)
    found: np.ndarray = clients[round < last + (1 << np.minimum(times, _LONGEST))]
    return found


def with_silent(own: Tree, before: Tree, asked: Iterable[int], heard: Collection[int], round: int) -> Tree:
    """Returns what a strategy remembers after a round, with the clients that have never answered.

    Args:
        own: what it remembers else.
        before: what it remembered before the round.
        asked: clients of the round that were asked and have not answered.
        heard: all clients that have ever answered.
        round: t.
    """
    kept = {client: (times, last) for client, times, last in _columns(before).T.tolist()}
    kept |= {client: (kept.get(client, (0, 0))[0] + 1, round) for client in asked}
    rows = [[client, *kept[client]] for client in sorted(kept) if client not in heard]
    others = {key: value for key, value in own.items() if key != _SILENT}
    return {**others, _SILENT: torch.tensor(rows, dtype=torch.int64)} if rows else others


def _columns(own: Tree) -> np.ndarray:
    """Returns clients, how often each was asked in vain, and the last such round; int64 of shape (3, n)."""
    found = own.get(_SILENT)
    return np.zeros((3, 0), np.int64) if found is None else found.numpy().T
