"""What damage to files has cost a run: rows of tables, and what clients had learned. It is put on record.

Rows that a table beside ``commits/`` still has are taken from there, if they give the very bytes that were committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rayfl.data.partitions.assignment import assignment_hash
from rayfl.errors import RunError
from rayfl.results.schemas import ALL_TABLES, DAMAGE_SCHEMA, PARTITION_KEY, recorded_schema
from rayfl.storage.commits import CommitStore, listed
from rayfl.storage.files import Storage
from rayfl.storage.manifest import CheckedCommit, Manifest, StoredFile, version_of
from rayfl.storage.own_files import rounds_in
from rayfl.storage.tables import decode_part, from_parquet, to_parquet

TABLE = "damage"
STATE = "state"
"""What the table's column ``lost`` has for a client's state."""

_UNREADABLE = (RunError, pa.ArrowException, OSError, KeyError, ValueError)
"""How a file fails that is missing or damaged as well."""


@dataclass(frozen=True)
class Mended:
    """A commit without its damaged files, not written yet.

    Attributes:
        manifest: names whole files only, and what was lost on record.
        said: what was done, a sentence each.
    """

    manifest: Manifest
    said: Sequence[str]


def mended(
    store: CommitStore, storage: Storage, found: CheckedCommit, states: Mapping[int, StoredFile] | None = None
) -> Mended:
    """A commit of which files are damaged, without these.

    Args:
        store: the commits.
        storage: the run's folder.
        found: the commit, and what is wrong with it; the server's model must be whole.
        states: older states for clients whose newest is lost; the others among these have none afterwards.
    """
    manifest, metadata = found.manifest, _metadata(store, storage, found)
    said, rows, tables = list[str](), list[dict[str, Any]](), dict[str, tuple[StoredFile, ...]]()
    for name in manifest.tables:
        kept = _kept_parts(store, storage, found, name, metadata, said, rows)
        if kept:
            tables[name] = tuple(kept)
    kept_states = dict(manifest.states)
    for client in manifest.clients_in(found.lost):
        damaged, older = kept_states.pop(client), (states or {}).get(client)
        if older is not None:
            kept_states[client] = older
        rows.append(_row(found, STATE, client, _lost_rounds(manifest, damaged, older), damaged))
    said += _said_of_states(rows)
    if rows:
        table = pa.Table.from_pylist(rows, schema=DAMAGE_SCHEMA.with_metadata(metadata[-1]))
        part = store.write_table(manifest.rounds_completed, TABLE, to_parquet(table))
        tables[TABLE] = (*tables.get(TABLE, ()), part)
    changes = {
        "version": version_of(manifest.server_parts),
        "tables": tables,
        "states": dict(sorted(kept_states.items())),
    }
    return Mended(manifest.model_copy(update=changes), said)


def _kept_parts(
    store: CommitStore,
    storage: Storage,
    found: CheckedCommit,
    name: str,
    metadata: Sequence[Mapping[bytes, bytes]],
    said: list[str],
    rows: list[dict[str, Any]],
) -> list[StoredFile]:
    """The parts of a table that are whole, or are made again; adds to what is said, and to the rows of what is lost."""
    manifest, kept = found.manifest, list[StoredFile]()
    schemas = [_schema(manifest, name, one) for one in metadata] if name in ALL_TABLES else []
    for part, first, last in _with_rounds(manifest, manifest.tables[name]):
        if part.name not in found.lost:
            kept.append(part)
            continue
        restored = _restored(storage, name, part, (first, last), schemas)
        if restored is not None:
            data, source = restored
            kept.append(store.write_table(last, name, data))
            said.append(f"{found.lost[part.name]}; {source}")
        else:
            rows.append(_row(found, name, None, (first, last), part))
            said.append(f"{found.lost[part.name]}; lost are the rows of {name} of {_rounds(first, last)}")
    if not kept and schemas:
        kept.append(store.write_table(manifest.rounds_completed, name, to_parquet(schemas[-1].empty_table())))
    return kept


def described(damage: pa.Table) -> list[str]:
    """Returns what a run has lost by its table ``damage``, a sentence for each table and one for the clients."""
    rows = damage.to_pylist()
    said = []
    for name in dict.fromkeys(row["lost"] for row in rows if row["lost"] != STATE):
        spans = [_rounds(row["first_round"], row["last_round"]) for row in rows if row["lost"] == name]
        said.append(f"Damage to files has cost {name}.parquet rows of {', '.join(spans)}: it is incomplete.")
    clients = sorted({row["client"] for row in rows if row["lost"] == STATE})
    if clients:
        after = ", ".join(map(str, sorted({row["round"] for row in rows if row["lost"] == STATE})))
        said.append(
            f"The run was repaired after round {after}: {listed(clients)} had lost their states and began again from "
            "older ones or from none. Its results are not those of an undisturbed run."
        )
    return said


def _said_of_states(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    spans: dict[int, list[int]] = {}
    for row in rows:
        if row["lost"] == STATE:
            spans.setdefault(row["first_round"], []).append(row["client"])
    for first, clients in sorted(spans.items()):
        state = f"from what they had after round {first - 1}" if first > 1 else "from what a client never sampled has"
        yield f"{listed(clients)} begin{'s' if len(clients) == 1 else ''} again {state}"


def _row(
    found: CheckedCommit, lost: str, client: int | None, span: tuple[int, int], file: StoredFile
) -> dict[str, Any]:
    return {
        "round": found.manifest.rounds_completed,
        "lost": lost,
        "client": client,
        "first_round": span[0],
        "last_round": span[1],
        "file": file.name,
        "reason": found.lost[file.name],
    }


def _rounds(first: int, last: int) -> str:
    return f"round {last}" if first == last else f"rounds {first} to {last}"


def _with_rounds(manifest: Manifest, parts: Sequence[StoredFile]) -> Iterator[tuple[StoredFile, int, int]]:
    """The parts of a table with the first and last round that may have rows in them."""
    before = 0
    for part in parts:
        last = _written_after(manifest, part)
        yield part, min(before + 1, last), last
        before = last


def _written_after(manifest: Manifest, file: StoredFile) -> int:
    rounds = rounds_in(file.name)
    return manifest.rounds_completed if rounds is None else rounds


def _lost_rounds(manifest: Manifest, damaged: StoredFile, older: StoredFile | None) -> tuple[int, int]:
    """First and last round of what a client had learned since an older state."""
    before = 0 if older is None else _written_after(manifest, older)
    return before + 1, _written_after(manifest, damaged)


def _schema(manifest: Manifest, name: str, metadata: Mapping[bytes, bytes]) -> pa.Schema:
    simulated = any(counter.startswith("clock_") for counter in manifest.counters)
    return recorded_schema(name, metadata, simulated, "clock_events" in manifest.counters)


def _metadata(store: CommitStore, storage: Storage, found: CheckedCommit) -> list[dict[bytes, bytes]]:
    """The metadata that tables of the run have, the newest last: rayfls of different ages may have written parts.

    They are from parts that are whole; without any, they say which data the run is about.
    """
    parts = sorted(found.manifest.table_files().items(), key=lambda item: rounds_in(item[0]) or 0)
    schemas = [decode_part(store.read(part), part).schema for name, part in parts if name not in found.lost]
    known = [dict(schema.metadata or {}) for schema in schemas]
    if known:
        return [metadata for place, metadata in enumerate(known) if metadata not in known[place + 1 :]]
    try:
        return [{PARTITION_KEY: assignment_hash(from_parquet(storage.read("partition.parquet"))).encode()}]
    except _UNREADABLE:
        return [{}]


def _restored(
    storage: Storage, name: str, part: StoredFile, span: tuple[int, int], schemas: Sequence[pa.Schema]
) -> tuple[bytes, str] | None:
    """A part's very bytes and where they are from, in words; None where they cannot be made."""
    candidates = [("it had no rows", schema.empty_table()) for schema in schemas]
    try:
        whole = from_parquet(storage.read(f"{name}.parquet"))
        inside = pc.and_(pc.greater_equal(whole["round"], span[0]), pc.less_equal(whole["round"], span[1]))
        rows, source = whole.filter(inside), f"its rows were taken from {name}.parquet"
        candidates += [(source, rows.replace_schema_metadata(schema.metadata)) for schema in schemas]
    except _UNREADABLE:
        pass
    for source, table in candidates:
        data = to_parquet(table)
        if hashlib.sha256(data).hexdigest() == part.sha256:
            return data, source
    return None
