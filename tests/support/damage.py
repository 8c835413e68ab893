"""Damage to the files of a run's commits."""

from __future__ import annotations

from pathlib import Path

from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import Manifest

STOPPED = 3
"""The round, of four, after which the run of the fixture `stopped` was interrupted."""


def manifests(folder: Path) -> list[Manifest]:
    """The manifests of a run's folder, the oldest first."""
    store = CommitStore(Storage(str(folder)))
    return [store.read_manifest(name) for name in store.manifests()]


def flip(path: Path) -> Path:
    """Changes one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return path
