"""Commits of a running experiment: started after a round, finished beside the next one."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from actors.federation import Federation
from rayfl.commits import FOLDER, CommitStore, Manifest, StoredFile, manifest_name
from rayfl.errors import DamageError, RunError
from rayfl.lease import Lease
from rayfl.params import Tree
from rayfl.storage import Storage
from rayfl.system.schedule import Clock
from rayfl.table_schemas import PARTITION_KEY
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
        clock: the virtual time of a simulated system.
    """

    rounds_completed: int
    server: Tree
    tables: ResultTables
    bytes_down: int = 0
    bytes_up: int = 0
    clock: Clock = field(default_factory=Clock)


@dataclass
class Recorder:
    """Writes and restores :class:`Progress` by the commit protocol.

    Args:
        storage: the run's folder.
        fingerprint: of the configuration.
        keep_commits: how many to keep.
        lease: the right to commit.
    """

    storage: Storage
    fingerprint: str
    keep_commits: int
    lease: Lease
    manifest: Manifest | None = None
    _written: dict[str, tuple[int, StoredFile]] = field(default_factory=dict)
    _pending: Future[Manifest] | None = None

    def __post_init__(self) -> None:
        self._store = CommitStore(self.storage)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="rayfl-commit")

    def start(self, progress: Progress, federation: Federation) -> None:
        """Begins a commit of ``progress``; its parts are not changed afterwards, so nothing is copied."""
        handles = federation.start_commit(progress.rounds_completed)
        tables, counters = progress.tables.by_name(), _counters(progress)
        self._pending = self._writer.submit(
            self._write, progress.rounds_completed, progress.server, tables, counters, federation, handles
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
        self.lease.check()
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
            RunError: when another driver has taken the run over; nothing was committed.
        """
        if self._pending is None:
            return None
        # Interrupted while it waits, it still knows what `abandon` has to wait for.
        self.manifest = self._pending.result()
        self._pending = None
        federation.adopt(self.manifest.states)
        return self.manifest.rounds_completed

    def abandon(self) -> None:
        """Waits for the commit under way, whatever becomes of it."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.exception()

    def restore(self, tables: ResultTables, thoroughly: bool = False) -> Progress | None:
        """The progress of the newest whole commit, None when there is none; commits after it are given up.

        Args:
            tables: gives names and sweep.
            thoroughly: whether all files are read to find out what is whole, or only what is needed at once.

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
        self.manifest = self._store.latest(thoroughly)
        self._written = {}
        if self.manifest is None:
            if self.storage.exists("rounds.parquet"):
                raise DamageError(
                    f"{self.storage.uri} has results, but {FOLDER}/ has no manifest: restore that folder, or choose "
                    "another name"
                )
            return None
        if self.manifest.fingerprint != self.fingerprint:
            raise RunError(
                f"{FOLDER}/{manifest_name(self.manifest.rounds_completed)} in {self.storage.uri} is of another run, or "
                f"of a rayfl whose configuration has other options (fingerprint {self.manifest.fingerprint[:12]}, here "
                f"{self.fingerprint[:12]}): choose another name, or continue with the rayfl that started the run"
            )
        lacking = {"clients", "rounds"} - set(self.manifest.tables)
        if lacking:
            raise DamageError(f"the commit of round {self.manifest.rounds_completed} has no table of {lacking.pop()}")
        contents = {name: self._store.read(file) for name, file in self.manifest.tables.items()}
        found = {name: from_parquet(data) for name, data in contents.items()}
        written, here = (table.schema.metadata.get(PARTITION_KEY) for table in (found["rounds"], tables.rounds))
        if written != here:
            raise RunError(
                f"the results in {self.storage.uri} are of other data than the configuration gives now: the data set's "
                "files or the partition's file have changed. Restore them, or choose another name"
            )
        self._written = {name: (found[name].num_rows, file) for name, file in self.manifest.tables.items()}
        progress = Progress(
            self.manifest.rounds_completed,
            self._store.read_server(self.manifest),
            tables.with_rows(found["clients"], found["rounds"], found.get("skipped"), found.get("calibration")),
            **{name: self.manifest.counters.get(name, 0) for name in ("bytes_down", "bytes_up")},
            clock=Clock(**{name: self.manifest.counters.get(f"clock_{name}", 0) for name in asdict(Clock())}),
        )
        self._store.drop_after(self.manifest.rounds_completed)
        self._publish(contents)
        return progress

    def close(self) -> None:
        """Ends the writing thread."""
        self._writer.shutdown(wait=True)


def _counters(progress: Progress) -> dict[str, int]:
    clock = {f"clock_{name}": value for name, value in asdict(progress.clock).items() if value}
    return {"bytes_down": progress.bytes_down, "bytes_up": progress.bytes_up, **clock}
