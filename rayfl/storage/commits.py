"""The commit protocol: shards first, the manifest last; a run is what its newest manifest says.

``commits/`` holds, by number of completed rounds r:

* ``server-<r>-<unique>.safetensors``: the server's tree; ``parts-<r>-<unique>...``: large parts of it that changed;
* ``states-<r>-<host>-<unique>.safetensors``: the states that changed since the commit before;
* ``rounds-<r>-<unique>.parquet``, ``clients-...``, ...: the last rows of the tables up to round r, when they grew;
* ``manifest-<r>.json``: which of these files make up the run after r rounds, with their SHA-256, and its own;
* ``newest.json``: the r of the newest manifest, so that it cannot go missing unnoticed.

A file with such a name that no kept manifest names is garbage, like the files of dropped manifests; other files are not
rayfl's. docs/commits.md has the format in full.
"""

from __future__ import annotations

import json
import logging
import shlex
import uuid
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rayfl.errors import DamageError, RunError
from rayfl.params import Tree
from rayfl.storage import treefile
from rayfl.storage.commit_files import FOLDER as FOLDER
from rayfl.storage.commit_files import CommitFiles
from rayfl.storage.files import Storage
from rayfl.storage.manifest import (
    CheckedCommit,
    Manifest,
    StoredFile,
    manifest_name,
    newest_rounds,
    parse,
    with_checksum,
)
from rayfl.storage.own_files import NEWEST, is_of_commits, manifest_rounds
from rayfl.storage.server_tree import put_back

_SHOWN = 20

_log = logging.getLogger("rayfl")


class CommitStore:
    """Writes and reads commits of one run.

    Every file gets a new name. A write that was made obsolete by a crash elsewhere, or a driver that has lost the run
    without knowing it, may still be writing a round that is repeated, and must not touch the new files.

    Args:
        storage: the run's folder.
        copy: a folder with a copy of every file, used if the first one is damaged; None for no copies.
    """

    def __init__(self, storage: Storage, copy: Storage | None = None) -> None:
        self._files = CommitFiles(storage, copy)

    def write_server(self, rounds_completed: int, tree: Tree) -> StoredFile:
        """Stores the server's tree."""
        return self._files.write(f"server-{rounds_completed:06d}-{_unique()}.safetensors", treefile.dumps(tree))

    def write_server_parts(self, rounds_completed: int, tree: Tree) -> StoredFile:
        """Stores parts of the server's tree that have changed."""
        return self._files.write(f"parts-{rounds_completed:06d}-{_unique()}.safetensors", treefile.dumps(tree))

    def write_states(self, rounds_completed: int, host: int, states: Mapping[int, Tree]) -> StoredFile:
        """Stores states one host changed."""
        tree = {str(client): dict(state) for client, state in sorted(states.items())}
        name = f"states-{rounds_completed:06d}-{host:04d}-{_unique()}.safetensors"
        return self._files.write(name, treefile.dumps(tree))

    def write_table(self, rounds_completed: int, name: str, data: bytes) -> StoredFile:
        """Stores rows of a table."""
        return self._files.write(f"{name}-{rounds_completed:06d}-{_unique()}.parquet", data)

    def write_manifest(self, manifest: Manifest) -> None:
        """Completes a commit: from now on the run continues after it."""
        self.replace_manifest(manifest)
        self._note_newest(manifest.rounds_completed)

    def replace_manifest(self, manifest: Manifest) -> None:
        """Replaces the manifest of an existing commit."""
        self._write_json(manifest_name(manifest.rounds_completed), with_checksum(manifest))

    def latest(self, thoroughly: bool = False) -> Manifest | None:
        """The newest commit that a run can continue from, without lost parts of tables; see :meth:`usable`."""
        found = self.usable(thoroughly)
        return None if found is None else found.manifest.without(found.lost)

    def ended_early(self) -> bool:
        """Returns whether the newest commit says that the run has ended before its last round."""
        names = self.manifests()
        with suppress(RunError):
            return bool(names) and self.read_manifest(names[-1]).ended_early
        return False

    def usable(self, thoroughly: bool = False) -> CheckedCommit | None:
        """Returns the newest whole commit, else the newest with whole models and states; None if there is no commit.

        A warning names the damage of newer ones. Presence and size of all files are checked.

        Args:
            thoroughly: whether to read all files and compare their checksums. They are compared in any case if the
                newest commit is damaged, because the one that replaces it must be whole.

        Raises:
            DamageError: when there are commits, but none with a whole server's model and all states.
            RunError: when a commit is of another format version.
        """
        problems, damaged = self.missing_newest(), list[CheckedCommit]()
        if not thoroughly:
            newest = next(self.survey(False, problems), None)
            if newest is not None and not (newest.lost or problems):
                return newest
            problems = self.missing_newest()
        for found in self.survey(True, problems):
            if not found.lost:
                return self._warn_and_use(found, problems)
            problems += [problem for problem in found.lost.values() if problem not in problems]
            damaged.append(found)
        for candidate in damaged:
            if candidate.trainable:
                return self._warn_and_use(candidate, problems)
        if problems:
            raise DamageError(f"{self._files.uri} has no whole commit: {'; '.join(problems)}. {self._advice(damaged)}")
        return None

    def survey(self, thoroughly: bool, problems: list[str]) -> Iterator[CheckedCommit]:
        """Yields the commits with readable manifests, the newest first, with the damage of their files.

        Args:
            thoroughly: whether to read all files, and compare their checksums.
            problems: receives a sentence for each manifest that cannot be read.

        Raises:
            RunError: when a commit is of another format version.
        """
        for name in reversed(self.manifests()):
            try:
                commit = self.read_manifest(name)
            except DamageError as error:
                problems.append(str(error))
            else:
                yield CheckedCommit(commit, self.damage(commit, thoroughly))

    def give_up(self, manifests: Container[str]) -> None:
        """Deletes unusable manifests; their files are deleted by the next commit."""
        self._files.delete(lambda name: manifest_rounds(name) is not None and name in manifests, _manifests_first)

    def _warn_and_use(self, found: CheckedCommit, problems: Sequence[str]) -> CheckedCommit:
        if problems:
            rounds = found.manifest.rounds_completed
            how = (
                f"Models and states after round {rounds} are whole and used"
                if found.lost
                else f"The commit of round {rounds} is whole and used instead; nothing is lost but the time since"
            )
            _log.warning("%s. %s", "; ".join(problems), how)
        return found

    def _advice(self, damaged: Sequence[CheckedCommit]) -> str:
        """Returns the advice for a run without a commit to continue from."""
        for candidate in damaged:
            clients = candidate.manifest.clients_in(candidate.lost)
            if candidate.has_server:
                return (
                    f"After round {candidate.manifest.rounds_completed} the server's model is whole, and lost are the "
                    f"states of {listed(clients)}. Restore these files; or let these clients begin again: `rayfl "
                    f"repair {shlex.quote(self._files.uri)}`"
                )
        return "Restore these files, or start over under another name"

    def missing_newest(self) -> list[str]:
        """Returns a sentence if the newest manifest is missing."""
        newest = self._newest()
        if newest is None or self._files.exists(manifest_name(newest)):
            return []
        return [f"{FOLDER}/{manifest_name(newest)} is missing from {self._files.uri}"]

    def drop_after(self, rounds_completed: int) -> None:
        """Drops the commits newer than this one: their rounds are repeated."""
        self._files.delete(lambda name: (manifest_rounds(name) or 0) > rounds_completed, _manifests_first)
        if self._newest() not in (None, rounds_completed):
            self._note_newest(rounds_completed)

    def damage(self, manifest: Manifest, thoroughly: bool) -> dict[str, str]:
        """Returns what is wrong with the files of a commit, a sentence each, by name; see :meth:`usable`."""
        return self._files.damage(manifest.stored(), thoroughly)

    def read_server(self, manifest: Manifest) -> Tree:
        """The server's tree of a commit."""
        tree = treefile.loads(self.read(manifest.server), manifest.server.name)
        for file, paths in manifest.parts_by_file().items():
            content = treefile.loads(self.read(file), file.name)
            for path in paths:
                put_back(tree, path, content, file.name)
        return tree

    def read_states(self, file: StoredFile) -> dict[int, Tree]:
        """All states of one file, by client."""
        return {int(client): state for client, state in treefile.loads(self.read(file), file.name).items()}

    def read(self, file: StoredFile) -> bytes:
        """A file of a commit, verified.

        Raises:
            DamageError: when it is missing or its checksum differs.
        """
        return self._files.read_stored(file)

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
        # Manifests first: a restart must not find one whose files are partly deleted.
        self._files.delete(
            lambda name: name not in needed and (name in dropped or is_of_commits(name)), _manifests_first
        )

    def foreign(self) -> list[str]:
        """The files in ``commits/`` that are not rayfl's, which it leaves alone."""
        named = set[str]()
        for name in self.manifests():
            with suppress(RunError):
                named |= self.read_manifest(name).files()
        return [name for name in self._files.names() if name not in named and not is_of_commits(name)]

    def manifests(self) -> list[str]:
        """The names of all manifests, the newest last."""
        return sorted((name for name in self._files.names() if manifest_rounds(name) is not None), key=_order)

    def read_manifest(self, name: str) -> Manifest:
        """A manifest, verified.

        Raises:
            DamageError: when it is missing, changed or no manifest.
            RunError: when it is of another format version.
        """
        return self._files.read(name, partial(parse, name))

    def newest(self) -> int | None:
        """The rounds of the newest manifest by ``newest.json``; None without one, as in runs of version 1.

        Raises:
            DamageError: when it is damaged.
        """
        return self._files.read(NEWEST, newest_rounds) if self._files.exists(NEWEST) else None

    def _newest(self) -> int | None:
        try:
            return self.newest()
        except DamageError as error:
            _log.warning("%s; the next commit writes it again", error)
            return None

    def _note_newest(self, rounds_completed: int) -> None:
        self._write_json(NEWEST, {"rounds_completed": rounds_completed})

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        self._files.write(name, json.dumps(content, indent=1).encode())


def listed(clients: Sequence[int]) -> str:
    """Clients in words: ``client 3``, ``clients 3, 5 and 10 more``."""
    shown = ", ".join(map(str, clients[:_SHOWN]))
    more = f" and {len(clients) - _SHOWN} more" if len(clients) > _SHOWN else ""
    return f"client{'s' if len(clients) > 1 else ''} {shown}{more}"


def _manifests_first(name: str) -> bool:
    return manifest_rounds(name) is None


def _order(name: str) -> tuple[int, str]:
    """Sorts manifests by their rounds, also those with more than six digits."""
    return len(name), name


def _unique() -> str:
    return uuid.uuid4().hex[:8]
