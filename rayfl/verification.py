"""Looks a run's folder over: is everything there, unchanged and readable, and does it belong together?

Nothing is changed, and no code of the run is imported: the folder may be somebody else's.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from rayfl import treefile
from rayfl.commits import FOLDER, CommitStore
from rayfl.data.assignment import assignment_hash
from rayfl.errors import RayflError, RunError
from rayfl.lease import FILE as LEASE
from rayfl.lease import read_lease
from rayfl.manifest import Manifest, StoredFile
from rayfl.own_files import NEWEST
from rayfl.storage import Storage
from rayfl.table_files import from_parquet, joined, read_parts, same_rows
from rayfl.table_schemas import PARTITION_KEY, TABLES, known_schema


@dataclass
class Report:
    """What was found.

    Attributes:
        commits: rounds of the commits that are whole, ascending.
        files: how many files were read.
        bytes: how many bytes they have.
        problems: what is wrong, a sentence each.
        notes: what is worth knowing, and not wrong.
    """

    commits: list[int] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(storage: Storage) -> Report:
    """Reads everything of a run.

    Args:
        storage: the run's folder.

    Raises:
        RunError: when there is no run.
    """
    if not storage.exists("config.yaml") and not storage.exists(FOLDER):
        raise RunError(f"{storage.uri} is no run's folder: it has neither config.yaml nor {FOLDER}/")
    report = Report()
    leads_to = storage.link_target(FOLDER)
    if leads_to is not None:
        report.problems.append(f"{FOLDER} in {storage.uri} is a link to {leads_to}: a run with it is not continued")
    report.problems += _config(storage)
    partition = _partition(storage, report)
    manifests = _commits(storage, partition, report)
    _published(storage, manifests, partition, report)
    try:
        holder = read_lease(storage)
    except RunError as error:
        report.problems.append(str(error))
        return report
    if holder is not None:
        report.notes.append(f"{LEASE}: {holder} is or was working on this run; what changes meanwhile may look damaged")
    return report


def _config(storage: Storage) -> Iterator[str]:
    try:
        content = yaml.safe_load(storage.read("config.yaml"))
    except FileNotFoundError:
        yield f"config.yaml is missing from {storage.uri}"
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        yield f"config.yaml in {storage.uri} is damaged: {error}"
    else:
        if not isinstance(content, dict):
            yield f"config.yaml in {storage.uri} is damaged: it has no sections"


def _partition(storage: Storage, report: Report) -> str | None:
    """The hash of who owns which sample; None where that is not known."""
    try:
        data = storage.read("partition.parquet")
        report.files, report.bytes = report.files + 1, report.bytes + len(data)
        return assignment_hash(pq.read_table(io.BytesIO(data)))
    except FileNotFoundError:
        report.problems.append(f"partition.parquet is missing from {storage.uri}")
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        report.problems.append(f"partition.parquet in {storage.uri} is damaged: {error}")
    return None


def _commits(storage: Storage, partition: str | None, report: Report) -> list[Manifest]:
    """Looks the commits over; returns the manifests that can be read."""
    store = CommitStore(storage)
    seen: dict[StoredFile, list[str]] = {}
    manifests: list[Manifest] = []
    names = store.manifests()
    for name in names:
        try:
            manifest = store.read_manifest(name)
        except RunError as error:
            report.problems.append(str(error))
            continue
        manifests.append(manifest)
        found = list(store.damage(manifest, thoroughly=False))
        for file in manifest.stored():
            if not any(file.name in problem for problem in found):
                if file not in seen:
                    seen[file] = _content(store, manifest, file, partition, report)
                found += seen[file]
        report.problems += [problem for problem in found if problem not in report.problems]
        if not found:
            report.commits.append(manifest.rounds_completed)
    report.problems += store.missing_newest()
    prints = {manifest.fingerprint for manifest in manifests}
    if len(prints) > 1:
        report.problems.append(f"the commits in {storage.uri}/{FOLDER} are of {len(prints)} different runs")
    if not names:
        report.notes.append("the run has no commit yet")
    foreign = store.foreign()
    if foreign:
        report.notes.append(f"{FOLDER}/ has files that are not rayfl's, which it leaves alone: {', '.join(foreign)}")
    known = {*names, NEWEST, *foreign}.union(*(manifest.files() for manifest in manifests))
    others = set(storage.names(FOLDER)) - known
    if others and not report.problems:
        report.notes.append(f"{len(others)} files in {FOLDER}/ belong to no commit; the next one removes them")
    return manifests


def _content(
    store: CommitStore, manifest: Manifest, file: StoredFile, partition: str | None, report: Report
) -> list[str]:
    """What is wrong with the content of a file of a commit."""
    try:
        data = store.read(file)
        report.files, report.bytes = report.files + 1, report.bytes + len(data)
        name = next((name for name, parts in manifest.tables.items() if file in parts), None)
        if name is not None:
            return _table(f"{FOLDER}/{file.name}", name, data, partition)
        tree = treefile.loads(data, f"{FOLDER}/{file.name}")
    except RayflError as error:
        return [str(error)]
    owners = {str(client) for client, held in manifest.states.items() if held == file}
    missing = sorted(owners - set(tree), key=int)
    return [f"{FOLDER}/{file.name} lacks the states of clients {', '.join(missing)}"] if missing else []


def _table(place: str, name: str, data: bytes, partition: str | None) -> list[str]:
    """What is wrong with a table of results."""
    try:
        table = from_parquet(data)
        foreign = name in TABLES and not known_schema(name, table.schema)
    except (pa.ArrowException, OSError, ValueError) as error:
        return [f"{place} is damaged: {error}"]
    if foreign:
        return [f"{place} has other columns than a table of {name}"]
    written = (table.schema.metadata or {}).get(PARTITION_KEY, b"").decode(errors="replace")
    if partition is not None and written != partition:
        return [f"{place} is of a run on other data: partition.parquet has hash {partition[:12]}, it {written[:12]}"]
    return []


def _published(storage: Storage, manifests: list[Manifest], partition: str | None, report: Report) -> None:
    """The tables beside the commits."""
    for name in TABLES:
        try:
            data = storage.read(f"{name}.parquet")
        except FileNotFoundError:
            continue
        report.files, report.bytes = report.files + 1, report.bytes + len(data)
        place = f"{name}.parquet in {storage.uri}"
        found = _table(place, name, data, partition)
        # What is wrong with commits is told elsewhere.
        if not found and manifests and not report.problems:
            if not _committed(CommitStore(storage), manifests[-1], name, data):
                found = [
                    f"{place} is not what was committed: it was changed, or the run crashed just then; the same "
                    "command that started the run writes it anew"
                ]
        report.problems += found


def _committed(store: CommitStore, manifest: Manifest, name: str, data: bytes) -> bool:
    """Whether a file has the rows of the commit and no others; while a run goes on it may have fewer."""
    if [hashlib.sha256(data).hexdigest()] == [part.sha256 for part in manifest.tables.get(name, ())]:
        return True  # as in runs of before there were parts, which were written with other settings
    mine = pq.read_metadata(io.BytesIO(data))
    expected = joined(_first(read_parts(store, manifest, name), mine.num_rows), from_parquet(data).schema)
    if data == expected:
        return True
    # Another version of Arrow writes the same rows in other bytes.
    versions = {file.created_by for file in (mine, pq.read_metadata(io.BytesIO(expected)))}
    return len(versions) > 1 and same_rows(from_parquet(data), from_parquet(expected))


def _first(parts: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    for part in parts:
        yield part.slice(0, rows)
        rows -= min(rows, part.num_rows)
