"""States of clients, and hosts that commit them."""

from __future__ import annotations

from typing import Any

import torch

from actors.hosting.state import Change, ClientStates, Signature
from rayfl.params import Tree
from rayfl.storage.commits import CommitStore
from rayfl.storage.manifest import StoredFile


def state(value: float) -> Tree:
    return {"local": {"w": torch.full((2,), float(value))}, "selections": int(value)}


def written(store: CommitStore, files: list[tuple[StoredFile, dict[int, Change]]]) -> dict[int, Tree]:
    """What a commit's files hold, which is what it says they do."""
    found: dict[int, Tree] = {}
    for file, changes in files:
        states = store.read_states(file)
        assert sorted(states) == sorted(changes)
        found.update(states)
    return found


def changes(change: Any) -> bool:
    """Whether the signature notices what ``change`` does to a state."""
    states = ClientStates(None, 0)
    states.replace(1, {"w": torch.ones(2), "inner": {"v": torch.ones(1)}, "n": 1}, 0)
    mine = states.checkout(1)
    before = Signature(mine)
    change(mine)
    return before.is_other(mine)
