"""What the commits of two runs of one configuration have in common: everything but names, places and times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.manifest import Manifest


def assert_same_commits(left: Path, right: Path) -> None:
    """Both runs keep commits of the same rounds, whose files have the same bytes.

    A tree's file holds all of its tensors, numbers, types and the order of its keys. Names of files are drawn, and
    ``config.yaml`` says where its run is; neither is compared. On several actors clients may be in other files.

    Args:
        left: the folder of a run in one process.
        right: that of another one.
    """
    one, other = _contents(left), _contents(right)
    assert one and one.keys() == other.keys()
    for rounds, content in one.items():
        differing = [name for name in content if content[name] != other[rounds][name]]
        assert not differing, f"commits of round {rounds} differ: {differing}"


def _contents(folder: Path) -> dict[int, dict[str, Any]]:
    store = CommitStore(Storage(str(folder)))
    manifests = [store.read_manifest(name) for name in store.manifests()]
    return {manifest.rounds_completed: _content(manifest) for manifest in manifests}


def _content(manifest: Manifest) -> dict[str, Any]:
    return {
        "server": manifest.server.sha256,
        "parts": {path: file.sha256 for path, file in manifest.server_parts.items()},
        "states": {client: file.sha256 for client, file in manifest.states.items()},
        "tables": {name: [file.sha256 for file in files] for name, files in manifest.tables.items()},
        "counters": manifest.counters,
        "fingerprint": manifest.fingerprint,
    }
