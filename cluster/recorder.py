"""Commits of a running experiment: started after a round, finished beside the next one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from actors.federation import Federation
from rayfl.commits import CommitStore, Manifest, StoredFile
from rayfl.params import Tree
from rayfl.storage import Storage
from rayfl.tables import ResultTables, from_parquet, to_parquet


@dataclass
class Progress:
    """Everything of a run that the driver must not forget.

    Attributes:
        rounds_completed: rounds done.
        server: the server's tree.
        tables: the results so far.
        bytes_down: bytes sent to clients so far.
        bytes_up: bytes received from clients so far.
    """

    rounds_completed: int
    server: Tree
    tables: ResultTables
    bytes_down: int = 0
    bytes_up: int = 0


@dataclass
class Recorder:
    """Writes and restores :class:`Progress` by the commit protocol.

    Args:
        storage: the run's folder.
        fingerprint: of the configuration.
        keep_commits: how many to keep.
    """

    storage: Storage
    fingerprint: str
    keep_commits: int
    manifest: Manifest | None = None
    _written: dict[str, tuple[int, StoredFile]] = field(default_factory=dict)
    _pending: Future[Manifest] | None = None

    def __post_init__(self) -> None:
        self._store = CommitStore(self.storage)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rayfl-commit")

    def start(self, progress: Progress, federation: Federation) -> None:
        """Begins a commit of ``progress``; its parts are not changed afterwards, so nothing is copied."""
        handles = federation.start_commit(progress.rounds_completed)
        tables = {"clients": progress.tables.clients, "rounds": progress.tables.rounds}
        self._pending = self._writer.submit(
            self._write, progress.rounds_completed, progress.server, tables, _counters(progress), federation, handles
        )

    def _write(
        self,
        rounds: int,
        server: Tree,
        tables: Mapping[str, Any],
        counters: dict[str, int],
        federation: Federation,
        handles: Mapping[Any, int],
    ) -> Manifest:
        grown = {name: to_parquet(table) for name, table in tables.items() if self._has_grown(name, table)}
        for name, data in grown.items():
            self._written[name] = (tables[name].num_rows, self._store.write_table(rounds, name, data))
        files = {name: file for name, (_, file) in sorted(self._written.items())}
        stored = self._store.write_server(rounds, server)
        states = dict(self.manifest.states) if self.manifest is not None else {}
        states.update(federation.finish_commit(handles))
        manifest = Manifest(
            rounds_completed=rounds,
            fingerprint=self.fingerprint,
            server=stored,
            states=dict(sorted(states.items())),
            tables=files,
            counters=counters,
        )
        self._store.write_manifest(manifest)
        self._store.collect(self.keep_commits)
        self._publish(grown)
        return manifest

    def _has_grown(self, name: str, table: Any) -> bool:
        return name not in self._written or self._written[name][0] != table.num_rows

    def _publish(self, tables: Mapping[str, bytes]) -> None:
        """Puts tables where users look for them, as of the last commit."""
        for name, data in tables.items():
            self.storage.write(f"{name}.parquet", data)

    def finish(self, federation: Federation) -> int | None:
        """Waits for the commit under way; returns its number of rounds, None when there is none.

        Raises:
            HostDiedError: when a host died before its states were written; the last commit stands.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        self.manifest = pending.result()
        federation.adopt(self.manifest.states)
        return self.manifest.rounds_completed

    def abandon(self) -> None:
        """Waits for the commit under way, whatever becomes of it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.exception()

    def restore(self, tables: ResultTables) -> Progress | None:
        """The progress of the last commit, None when there is none; ``tables`` gives names and sweep."""
        self.manifest = self._store.latest()
        self._written = {}
        if self.manifest is None:
            return None
        contents = {name: self._store.read(file) for name, file in self.manifest.tables.items()}
        found = {name: from_parquet(data) for name, data in contents.items()}
        self._written = {name: (found[name].num_rows, file) for name, file in self.manifest.tables.items()}
        progress = Progress(
            self.manifest.rounds_completed,
            self._store.read_server(self.manifest),
            tables.with_rows(found["clients"], found["rounds"]),
            **self.manifest.counters,
        )
        self._publish(contents)
        return progress

    def close(self) -> None:
        """Ends the writing thread."""
        self._writer.shutdown(wait=True)


def _counters(progress: Progress) -> dict[str, int]:
    return {"bytes_down": progress.bytes_down, "bytes_up": progress.bytes_up}
