"""Commits of a small run."""

from __future__ import annotations

import torch

from rayfl.params import Tree
from rayfl.storage.commits import CommitStore
from rayfl.storage.manifest import Manifest


def server(value: float) -> Tree:
    return {"model": {"w": torch.full((3,), value)}, "round": int(value)}


def state(value: float) -> Tree:
    return {"local": {"w": torch.full((2,), value)}, "selections": int(value)}


def commit(store: CommitStore, rounds: int, changed: dict[int, dict[int, float]]) -> Manifest:
    """Commits states by host and client on top of the newest manifest."""
    before = store.latest()
    states = dict(before.states) if before else {}
    for host, values in changed.items():
        file = store.write_states(rounds, host, {client: state(value) for client, value in values.items()})
        states.update(dict.fromkeys(values, file))
    manifest = Manifest(
        rounds_completed=rounds,
        fingerprint="print",
        server=store.write_server(rounds, server(rounds)),
        states=states,
        tables={"rounds": (store.write_table(rounds, "rounds", f"table {rounds}".encode()),)},
    )
    store.write_manifest(manifest)
    return manifest
