"""Writes the commits of a running experiment, each while the next round is computed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from actors.federation.federation import Federation
from cluster.rounds.progress import Progress, check_same_data
from rayfl.config.identity import OlderRule
from rayfl.errors import DamageError, RunError
from rayfl.params import Tree
from rayfl.results.tables import ResultTables
from rayfl.runs.repair import mend_tables
from rayfl.storage.commits import FOLDER, CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.lease import Lease
from rayfl.storage.manifest import Manifest, StoredFile, manifest_name, version_of
from rayfl.storage.run_folder import changed_inputs
from rayfl.storage.server_parts import ServerParts
from rayfl.storage.tables import PartedTable, publish_table, read_whole

PUBLISH_EVERY_S = 10.0
"""Seconds that pass at least before the tables beside ``commits/`` are written again."""
PUBLISH_SPACING = 20
"""Multiple of the time that it took to write them which passes at least before they are written again."""

_log = logging.getLogger("rayfl")


@dataclass
class Recorder:
    """Writes and restores :class:`Progress` by the commit protocol.

    Args:
        storage: the run's folder.
        fingerprint: fingerprint of the configuration.
        keep_commits: number of commits to keep.
        lease: the right to commit.
        copy: the folder with copies of the run's files, if it has one.
        inputs: SHA-256 of the files that say what the run is, by name.
        older: by fingerprint, the rules under which an older rayfl may have begun this run.

    Attributes:
        began_under: the one of these rules under which it has begun; None for today's.
    """

    storage: Storage
    fingerprint: str
    keep_commits: int
    lease: Lease
    copy: Storage | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, OlderRule] = field(default_factory=dict)
    began_under: OlderRule | None = None
    manifest: Manifest | None = None
    _tables: dict[str, PartedTable] = field(default_factory=dict)
    _published: dict[str, tuple[StoredFile, ...]] = field(default_factory=dict)
    _metadata: Mapping[bytes, bytes] = field(default_factory=dict)
    _next_publish: float = 0.0
    _pending: Future[Manifest] | None = None
    _counts: dict[str, int] = field(default_factory=dict)
    _parts: ServerParts = field(default_factory=ServerParts)

    def __post_init__(self) -> None:
        self._store = CommitStore(self.storage, self.copy)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rayfl-commit")

    def start(self, progress: Progress, federation: Federation) -> None:
        """Starts a commit of ``progress``. Nothing is copied, because its parts are not changed afterwards.

        Raises:
            RunError: when the lease is lost; nothing is written then, as the folder may be gone or another driver's.
        """
        self.lease.check()
        handles = federation.start_commit(progress.rounds_completed)
        counters, server = progress.counters, progress.server_file
        self._pending = self._writer.submit(
            self._write, progress.rounds_completed, server, progress.tables, counters, federation, handles
        )

    def _write(
        self,
        rounds: int,
        server: Tree,
        results: ResultTables,
        counters: dict[str, int | float],
        federation: Federation,
        handles: dict[Any, int],
    ) -> Manifest:
        for name, rows in results.by_name().items():
            table = self._tables.setdefault(name, PartedTable(name))
            table.append(self._store, rounds, rows.slice(table.rows - results.committed[name]))
        stored, parts = self._parts.write(self._store, rounds, server)
        states = dict(self.manifest.states) if self.manifest is not None else {}
        states.update(federation.finish_commit(handles, self._counts))
        self._counts = {file.name: count for file in states.values() if (count := self._counts.get(file.name))}
        manifest = Manifest(
            version=version_of(parts),
            rounds_completed=rounds,
            fingerprint=self.fingerprint,
            server=stored,
            server_parts=parts,
            states=dict(sorted(states.items())),
            tables={name: table.files for name, table in sorted(self._tables.items())},
            counters=counters,
            inputs=dict(self.inputs),
        )
        self.lease.check()
        self._store.write_manifest(manifest)
        self._store.collect(self.keep_commits)
        if time.monotonic() >= self._next_publish:
            try:
                self._publish(manifest)
            except RunError as error:
                # Training does not need these tables. Lost rows are recorded at the end of the run.
                _log.warning("%s. The run goes on; its tables are written at its end", error)
                self._next_publish = math.inf
        return manifest

    def _publish(self, manifest: Manifest) -> None:
        """Writes the tables of a commit beside ``commits/``, where users look for them.

        Each is written as a whole, in time proportional to its rows, and therefore only from time to time.
        """
        begun = time.monotonic()
        for name, files in manifest.tables.items():
            if self._published.get(name) != files:
                publish_table(self._store, self.storage, manifest, name, self._metadata)
                self._published[name] = files
        # Blocks of this size would otherwise accumulate in Arrow's memory pool.
        pa.default_memory_pool().release_unused()
        now = time.monotonic()
        self._next_publish = now + max(PUBLISH_EVERY_S, PUBLISH_SPACING * (now - begun))

    def publish(self) -> None:
        """Writes the tables of the last commit beside ``commits/``.

        Raises:
            RunError: when another driver has taken the run over, or nothing can be written.
        """
        if self.manifest is not None and self._published != self.manifest.tables:
            self.lease.check()
            self._publish(self.manifest)

    @property
    def state_bytes(self) -> int:
        """Size of the files that hold the client states of the last commit."""
        return 0 if self.manifest is None else self.manifest.state_bytes

    def states_on_storage(self) -> tuple[int, float | None]:
        """Returns how many clients have a state in the last commit, and the bytes of one of these on average.

        A file's bytes are shared evenly by the states that it was written with: some of them may be outdated. Files
        from before the run was continued are left out, as how many they have is not known; None if all are.
        """
        files = [] if self.manifest is None else list(self.manifest.states.values())
        sizes = [file.size / self._counts[file.name] for file in files if file.name in self._counts]
        return len(files), (sum(sizes) / len(sizes) if sizes else None)

    @property
    def committed(self) -> dict[str, int]:
        """Number of rows on storage by table; to be read only while no commit is under way."""
        return {name: table.rows for name, table in self._tables.items()}

    def rows(self, name: str) -> pa.Table:
        """Returns a table of the last commit; without one, a table without rows and columns."""
        return pa.table({}) if self.manifest is None else read_whole(self._store, self.manifest, name)

    def results(self) -> dict[str, pa.Table]:
        """Returns the tables of the last commit by name, and writes them beside ``commits/``. There must be a commit.

        Lost rows are recorded first.

        Raises:
            RunError: when another driver has taken the run over, or nothing can be written.
        """
        try:
            return self._results()
        except DamageError:
            self.lease.check()
            self._mend()
            self.manifest = self._store.latest()
            return self._results()

    def _results(self) -> dict[str, pa.Table]:
        assert self.manifest is not None
        self.publish()
        tables = {name: read_whole(self._store, self.manifest, name) for name in self.manifest.tables}
        return {
            name: table.replace_schema_metadata({**(table.schema.metadata or {}), **self._metadata})
            for name, table in tables.items()
        }

    def _mend(self) -> None:
        for line in mend_tables(self._store, self.storage):
            _log.warning("%s", line)

    def finish(self, federation: Federation) -> int | None:
        """Waits for the commit under way; returns its number of rounds, None when there is none.

        Raises:
            HostDiedError: when a host died before its states were written; the last commit stands.
            RunError: when another driver has taken the run over; nothing was committed.
        """
        if self._pending is None:
            return None
        # After an interrupt `abandon` still knows what to wait for.
        self.manifest = self._pending.result()
        self._pending = None
        federation.adopt(self.manifest.states)
        return self.manifest.rounds_completed

    def abandon(self) -> None:
        """Waits for the commit under way, whether it succeeds or not."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if pending.exception() is None:
                self.manifest = pending.result()

    def restore(self, tables: ResultTables, thoroughly: bool = False) -> Progress | None:
        """Returns the progress of the newest whole commit, None if there is none, and gives up later commits.

        Args:
            tables: empty tables, with names, sweep and metadata.
            thoroughly: whether to read all files to find damage; if not, only those that are needed at once.

        Raises:
            DamageError: when there are commits, but no whole one.
            RunError: when the commits are another run's, or of another format.
        """
        self.lease.check()
        try:
            return self._restored(tables, thoroughly)
        except DamageError:
            if thoroughly:
                raise
            return self._restored(tables, thoroughly=True)

    def _restored(self, tables: ResultTables, thoroughly: bool) -> Progress | None:
        found = self._store.usable(thoroughly)
        self._tables, self._parts, self.manifest = {}, ServerParts(), None
        if found is None:
            if self.storage.exists("rounds.parquet"):
                raise DamageError(
                    f"{self.storage.uri} has results, but {FOLDER}/ has no manifest: restore that folder, or choose "
                    "another name"
                )
            self._metadata = tables.metadata
            return None
        self._check_fingerprint(found.manifest)
        if found.lost:
            self._mend()
            found = self._store.usable(thoroughly) or found
        self.manifest = found.manifest
        for name in changed_inputs(found.manifest, self.inputs):
            _log.warning(
                "%s in %s was changed after the commit of round %d. What results depend on is the same",
                name,
                self.storage.uri,
                found.manifest.rounds_completed,
            )
        lacking = {"clients", "rounds"} - set(self.manifest.tables)
        if lacking:
            raise DamageError(f"the commit of round {self.manifest.rounds_completed} has no table of {lacking.pop()}")
        columns = {}
        for name in self.manifest.tables:
            self._tables[name], columns[name] = PartedTable.restored(self._store, self.manifest, name)
        check_same_data(columns["rounds"], tables, self.storage.uri)
        self._metadata = tables.metadata
        content, rounds = self._store.read_server(self.manifest), self.manifest.rounds_completed
        self._parts.restore(self.manifest, content)
        progress = Progress.after(rounds, content, tables.after(self.committed), self.manifest.counters)
        self._store.drop_after(rounds)
        self._publish(self.manifest)
        return progress

    def _check_fingerprint(self, manifest: Manifest) -> None:
        if manifest.fingerprint in self.older:
            # All commits of a run have the fingerprint that it began with.
            self.fingerprint, self.began_under = manifest.fingerprint, self.older[manifest.fingerprint]
        elif manifest.fingerprint != self.fingerprint:
            raise RunError(
                f"{FOLDER}/{manifest_name(manifest.rounds_completed)} in {self.storage.uri} is of another run, or "
                f"of a rayfl whose configuration has other options (fingerprint {manifest.fingerprint[:12]}, here "
                f"{self.fingerprint[:12]}): choose another name, or continue with the rayfl that started the run"
            )

    def close(self) -> None:
        """Ends the writing thread. After an error the tables beside ``commits/`` are written if that is possible."""
        self._writer.shutdown(wait=True)
        try:
            self.publish()
        except RunError as error:
            _log.warning("the tables beside commits/ are older than the last commit: %s", error)
