"""The commit protocol: shards first, the manifest last; a run is what its newest manifest says.

``commits/`` holds, by number of completed rounds r:

* ``server-<r>.safetensors``: the server's tree;
* ``states-<r>-<host>-<unique>.safetensors``: the states that changed since the commit before, one file a host;
* ``rounds-<r>.parquet``, ``clients-<r>.parquet``: the tables up to round r, when they grew;
* ``manifest-<r>.json``: which of these files make up the run after r rounds, with their SHA-256.

A file that no kept manifest names is garbage, whoever left it behind.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rayfl import treefile
from rayfl.errors import RunError
from rayfl.params import Tree
from rayfl.storage import Storage

FORMAT_VERSION = 1
_FOLDER = "commits"


class StoredFile(BaseModel):
    """A file of a commit and its checksum."""

    model_config = ConfigDict(frozen=True)

    name: str
    sha256: str


class Manifest(BaseModel):
    """One commit.

    Attributes:
        version: of this format.
        rounds_completed: rounds the run has behind it.
        fingerprint: of the configuration the run was made with.
        server: the server's tree.
        states: by client id, the file that holds its newest state.
        tables: the Parquet tables by name.
        counters: totals since the start (bytes sent).
    """

    model_config = ConfigDict(frozen=True)

    version: int = FORMAT_VERSION
    rounds_completed: int = Field(ge=0)
    fingerprint: str
    server: StoredFile
    states: dict[int, StoredFile] = {}
    tables: dict[str, StoredFile] = {}
    counters: dict[str, int] = {}

    def files(self) -> set[str]:
        """The names of all files of this commit but the manifest itself."""
        return {file.name for file in (self.server, *self.states.values(), *self.tables.values())}


class CommitStore:
    """Writes and reads commits of one run.

    Args:
        storage: the run's folder.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def write_server(self, rounds_completed: int, tree: Tree) -> StoredFile:
        """Stores the server's tree."""
        return self._write(f"server-{rounds_completed:06d}.safetensors", treefile.dumps(tree))

    def write_states(self, rounds_completed: int, host: int, states: Mapping[int, Tree]) -> StoredFile:
        """Stores the states one host changed.

        The name is new each time: a write that a crash elsewhere has made useless may still be under way when the
        round is done again, and must not touch the files of the second try.
        """
        tree = {str(client): dict(state) for client, state in sorted(states.items())}
        name = f"states-{rounds_completed:06d}-{host:04d}-{uuid.uuid4().hex[:8]}.safetensors"
        return self._write(name, treefile.dumps(tree))

    def write_table(self, rounds_completed: int, name: str, data: bytes) -> StoredFile:
        """Stores a table."""
        return self._write(f"{name}-{rounds_completed:06d}.parquet", data)

    def write_manifest(self, manifest: Manifest) -> None:
        """Makes a commit: from here on the run continues after it."""
        self._storage.write(
            f"{_FOLDER}/manifest-{manifest.rounds_completed:06d}.json",
            manifest.model_dump_json(indent=1).encode(),
        )

    def latest(self) -> Manifest | None:
        """The newest commit; None for a run that has none.

        Raises:
            RunError: when a manifest is damaged or of a newer format.
        """
        names = self._manifests()
        return self._read_manifest(names[-1]) if names else None

    def read_server(self, manifest: Manifest) -> Tree:
        """The server's tree of a commit."""
        return treefile.loads(self.read(manifest.server), manifest.server.name)

    def read_states(self, file: StoredFile) -> dict[int, Tree]:
        """All states of one file, by client."""
        return {int(client): state for client, state in treefile.loads(self.read(file), file.name).items()}

    def read(self, file: StoredFile) -> bytes:
        """A file of a commit, verified.

        Raises:
            RunError: when it is missing or its checksum differs.
        """
        try:
            data = self._storage.read(f"{_FOLDER}/{file.name}")
        except FileNotFoundError as error:
            raise RunError(f"{_FOLDER}/{file.name} is missing from {self._storage.uri}") from error
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise RunError(f"{_FOLDER}/{file.name} in {self._storage.uri} is damaged: its SHA-256 has changed")
        return data

    def collect(self, keep: int) -> None:
        """Deletes all but the newest ``keep`` (at least one) commits and every file none of these names.

        That includes the files of a commit that has no manifest yet: call it only when none is being written.
        """
        if keep < 1:
            raise ValueError(f"at least one commit must be kept, got {keep}")
        manifests = self._manifests()
        kept = manifests[-keep:]
        needed = set(kept).union(*(self._read_manifest(name).files() for name in kept))
        # Manifests go first: one whose files are half deleted must not be found by a restart.
        doomed = [name for name in self._storage.names(_FOLDER) if name not in needed]
        for name in sorted(doomed, key=lambda name: not name.startswith("manifest-")):
            self._storage.delete(f"{_FOLDER}/{name}")

    def _manifests(self) -> list[str]:
        return [name for name in self._storage.names(_FOLDER) if name.startswith("manifest-") and name.endswith("json")]

    def _read_manifest(self, name: str) -> Manifest:
        try:
            content: dict[str, Any] = json.loads(self._storage.read(f"{_FOLDER}/{name}"))
            version = content.get("version")
            if version != FORMAT_VERSION:
                raise RunError(
                    f"{_FOLDER}/{name} has format version {version}, this rayfl reads {FORMAT_VERSION}: "
                    "continue the run with the rayfl that started it"
                )
            return Manifest.model_validate(content)
        except (ValueError, AttributeError, ValidationError) as error:
            raise RunError(f"{_FOLDER}/{name} in {self._storage.uri} is damaged: {error}") from error

    def _write(self, name: str, data: bytes) -> StoredFile:
        self._storage.write(f"{_FOLDER}/{name}", data)
        return StoredFile(name=name, sha256=hashlib.sha256(data).hexdigest())
