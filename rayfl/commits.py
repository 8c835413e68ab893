"""The commit protocol: shards first, the manifest last; a run is what its newest manifest says.

``commits/`` holds, by number of completed rounds r:

* ``server-<r>-<unique>.safetensors``: the server's tree;
* ``states-<r>-<host>-<unique>.safetensors``: the states that changed since the commit before;
* ``rounds-<r>-<unique>.parquet``, ``clients-...``, ...: the last rows of the tables up to round r, when they grew;
* ``manifest-<r>.json``: which of these files make up the run after r rounds, with their SHA-256, and its own;
* ``newest.json``: the r of the newest manifest, so that it cannot go missing unnoticed.

A file with such a name that no kept manifest has is garbage, and so is what dropped manifests named; other files are
somebody else's. docs/commits.md has the format in full.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from rayfl import treefile
from rayfl.errors import DamageError, RunError
from rayfl.manifest import Manifest, StoredFile, manifest_name, parse, with_checksum
from rayfl.own_files import NEWEST, is_of_commits, manifest_rounds
from rayfl.params import Tree
from rayfl.storage import Storage

FOLDER = "commits"
_READERS = 8

_log = logging.getLogger("rayfl")


class CommitStore:
    """Writes and reads commits of one run.

    Names of files are new each time: a write that a crash elsewhere has made useless, or a driver that has lost the
    run and does not know it yet, may still be writing a round that is done again, and must not touch the files of
    the second try.

    Args:
        storage: the run's folder.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def write_server(self, rounds_completed: int, tree: Tree) -> StoredFile:
        """Stores the server's tree."""
        return self._write(f"server-{rounds_completed:06d}-{_unique()}.safetensors", treefile.dumps(tree))

    def write_states(self, rounds_completed: int, host: int, states: Mapping[int, Tree]) -> StoredFile:
        """Stores states one host changed."""
        tree = {str(client): dict(state) for client, state in sorted(states.items())}
        name = f"states-{rounds_completed:06d}-{host:04d}-{_unique()}.safetensors"
        return self._write(name, treefile.dumps(tree))

    def write_table(self, rounds_completed: int, name: str, data: bytes) -> StoredFile:
        """Stores rows of a table."""
        return self._write(f"{name}-{rounds_completed:06d}-{_unique()}.parquet", data)

    def write_manifest(self, manifest: Manifest) -> None:
        """Makes a commit: from here on the run continues after it."""
        self._write_json(manifest_name(manifest.rounds_completed), with_checksum(manifest))
        self._note_newest(manifest.rounds_completed)

    def latest(self, thoroughly: bool = False) -> Manifest | None:
        """The newest commit that is whole; None for a run that has none.

        A warning names what is wrong with newer ones. Size and presence of all files are looked at.

        Args:
            thoroughly: whether to read all files, and compare their checksums.

        Raises:
            DamageError: when there are commits, but no whole one.
            RunError: when a commit is of another format version.
        """
        problems = self.missing_newest()
        for name in reversed(self.manifests()):
            try:
                manifest = self.read_manifest(name)
                found = list(self.damage(manifest, thoroughly))
            except DamageError as error:
                found = [str(error)]
            if not found:
                if problems:
                    _log.warning(
                        "%s. The commit of round %d is whole and used instead; nothing is lost but the time since",
                        "; ".join(problems),
                        manifest.rounds_completed,
                    )
                return manifest
            problems += found
        if problems:
            raise DamageError(
                f"{self._storage.uri} has no whole commit: {'; '.join(problems)}. Restore these files, or start over "
                "under another name"
            )
        return None

    def missing_newest(self) -> list[str]:
        """A sentence that the newest manifest is not there, if so."""
        newest = self._newest()
        if newest is None or self._storage.exists(f"{FOLDER}/{manifest_name(newest)}"):
            return []
        return [f"{FOLDER}/{manifest_name(newest)} is missing from {self._storage.uri}"]

    def drop_after(self, rounds_completed: int) -> None:
        """Gives up the commits newer than this one: the rounds are done again."""
        for name in self.manifests():
            if _order(name) > _order(manifest_name(rounds_completed)):
                self._storage.delete(f"{FOLDER}/{name}")
        if self._newest() not in (None, rounds_completed):
            self._note_newest(rounds_completed)

    def damage(self, manifest: Manifest, thoroughly: bool) -> Iterator[str]:
        """What is wrong with the files of a commit, a sentence each; see :meth:`latest`."""
        sizes = self._storage.sizes(FOLDER)
        present = []
        for file in manifest.stored():
            if file.name not in sizes:
                yield f"{FOLDER}/{file.name} is missing from {self._storage.uri}"
            elif file.size not in (0, sizes[file.name]):
                yield f"{self._damaged(file.name)}: it has {sizes[file.name]} of {file.size} bytes"
            else:
                present.append(file)
        if thoroughly:
            with ThreadPoolExecutor(_READERS) as readers:
                digests = readers.map(lambda file: self._storage.digest(f"{FOLDER}/{file.name}"), present)
                for file, digest in zip(present, digests, strict=True):
                    if digest != file.sha256:
                        yield f"{self._damaged(file.name)}: its SHA-256 has changed"

    def read_server(self, manifest: Manifest) -> Tree:
        """The server's tree of a commit."""
        return treefile.loads(self.read(manifest.server), manifest.server.name)

    def read_states(self, file: StoredFile) -> dict[int, Tree]:
        """All states of one file, by client."""
        return {int(client): state for client, state in treefile.loads(self.read(file), file.name).items()}

    def read(self, file: StoredFile) -> bytes:
        """A file of a commit, verified.

        Raises:
            DamageError: when it is missing or its checksum differs.
        """
        try:
            data = self._storage.read(f"{FOLDER}/{file.name}")
        except FileNotFoundError as error:
            raise DamageError(f"{FOLDER}/{file.name} is missing from {self._storage.uri}") from error
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise DamageError(f"{self._damaged(file.name)}: its SHA-256 has changed")
        return data

    def collect(self, keep: int) -> None:
        """Deletes all but the newest ``keep`` (at least one) commits, and what rayfl has written beside them.

        That includes the files of a commit that has no manifest yet: call it only when none is being written. Files
        that are not rayfl's, by their names and by what manifests name, stay.
        """
        if keep < 1:
            raise ValueError(f"at least one commit must be kept, got {keep}")
        needed, dropped = {NEWEST}, set[str]()
        for name in reversed(self.manifests()):
            try:
                files = self.read_manifest(name).files()
            except DamageError as error:
                _log.warning("%s; this commit is given up", error)
                continue
            if keep:
                needed |= {name, *files}
                keep -= 1
            else:
                dropped |= files
        # Manifests go first: one whose files are half deleted must not be found by a restart.
        found = [name for name in self._storage.names(FOLDER) if name in dropped or is_of_commits(name)]
        doomed = [name for name in found if name not in needed]
        for name in sorted(doomed, key=lambda name: not name.startswith("manifest-")):
            self._storage.delete(f"{FOLDER}/{name}")

    def foreign(self) -> list[str]:
        """The files in ``commits/`` that are not rayfl's, which it leaves alone."""
        named = set[str]()
        for name in self.manifests():
            with suppress(RunError):
                named |= self.read_manifest(name).files()
        return [name for name in self._storage.names(FOLDER) if name not in named and not is_of_commits(name)]

    def manifests(self) -> list[str]:
        """The names of all manifests, the newest last."""
        names = self._storage.names(FOLDER)
        return sorted((name for name in names if manifest_rounds(name) is not None), key=_order)

    def read_manifest(self, name: str) -> Manifest:
        """A manifest, verified.

        Raises:
            DamageError: when it is missing, changed or no manifest.
            RunError: when it is of another format version.
        """
        try:
            data = self._storage.read(f"{FOLDER}/{name}")
        except FileNotFoundError as error:
            raise DamageError(f"{FOLDER}/{name} is missing from {self._storage.uri}") from error
        return parse(name, data, f"{FOLDER}/{name} in {self._storage.uri}")

    def _newest(self) -> int | None:
        """What ``newest.json`` says; None without one (in runs of version 1) and where it is damaged, too."""
        try:
            return int(json.loads(self._storage.read(f"{FOLDER}/{NEWEST}"))["rounds_completed"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("%s: %s; the next commit writes it anew", self._damaged(NEWEST), error)
            return None

    def _note_newest(self, rounds_completed: int) -> None:
        self._write_json(NEWEST, {"rounds_completed": rounds_completed})

    def _damaged(self, name: str) -> str:
        return f"{FOLDER}/{name} in {self._storage.uri} is damaged"

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        self._storage.write(f"{FOLDER}/{name}", json.dumps(content, indent=1).encode())

    def _write(self, name: str, data: bytes) -> StoredFile:
        self._storage.write(f"{FOLDER}/{name}", data)
        return StoredFile(name=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def _order(name: str) -> tuple[int, str]:
    """Sorts manifests by their rounds, also those with more than six digits."""
    return len(name), name


def _unique() -> str:
    return uuid.uuid4().hex[:8]
