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

from rayfl.config.plain_yaml import read_yaml
from rayfl.data.partitions.assignment import assignment_hash
from rayfl.errors import DamageError, RayflError, RunError
from rayfl.experiment.copies import copy_by_config
from rayfl.results.schemas import ALL_TABLES, PARTITION_KEY, known_schema
from rayfl.runs.accompanying import damaged_files
from rayfl.runs.damage import TABLE, described
from rayfl.runs.outside import outside_files
from rayfl.storage import treefile
from rayfl.storage.commit_files import damage_in
from rayfl.storage.commits import FOLDER, CommitStore
from rayfl.storage.files import Storage
from rayfl.storage.lease import FILE as LEASE
from rayfl.storage.lease import read_lease
from rayfl.storage.manifest import Manifest, StoredFile, manifest_name
from rayfl.storage.own_files import BEGINNING, NEWEST
from rayfl.storage.run_folder import CONFIG, changed_inputs, input_digests
from rayfl.storage.server_tree import has_part
from rayfl.storage.tables import from_parquet, read_parts, read_whole, same_rows, to_one_parquet


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
    if not storage.exists(CONFIG) and not storage.exists(FOLDER):
        raise RunError(f"{storage.uri} is no run's folder: it has neither config.yaml nor {FOLDER}/")
    report = Report()
    leads_to = storage.link_target(FOLDER)
    if leads_to is not None:
        report.problems.append(f"{FOLDER} in {storage.uri} is a link to {leads_to}: a run with it is not continued")
    report.problems += _config(storage)
    _outside(storage, report)
    partition = _partition(storage, report)
    manifests = _commits(storage, partition, report)
    _inputs(storage, manifests, report)
    _published(storage, manifests, partition, report)
    _copies(storage, manifests, report)
    report.problems += damaged_files(storage)
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
        content = read_yaml(storage.read(CONFIG))
    except FileNotFoundError:
        yield f"{CONFIG} is missing from {storage.uri}"
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        yield f"{CONFIG} in {storage.uri} is damaged: {error}"
    else:
        if not isinstance(content, dict):
            yield f"{CONFIG} in {storage.uri} is damaged: it has no sections"


def _outside(storage: Storage, report: Report) -> None:
    """Reads the pretrained models and the tokenizer that the run is tied to, where they lie on this machine."""
    try:
        content = read_yaml(storage.read(CONFIG))
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return  # said of config.yaml
    for found in outside_files(content) if isinstance(content, dict) else ():
        report.files, report.bytes = report.files + found.files, report.bytes + found.bytes
        report.problems += [found.problem] if found.problem else []
        report.notes += [found.note] if found.note else []


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
        lost = store.damage(manifest, thoroughly=False)
        found = list(lost.values())
        for file in manifest.stored():
            if file.name not in lost:
                if file not in seen:
                    seen[file] = _content(store, manifest, file, partition, report)
                found += seen[file]
        report.problems += [problem for problem in found if problem not in report.problems]
        if not found:
            report.commits.append(manifest.rounds_completed)
    try:
        store.newest()
        report.problems += store.missing_newest()
    except DamageError as error:
        report.problems.append(f"{error}; the next commit writes it again")
    if report.commits and manifests[-1].rounds_completed in report.commits and TABLE in manifests[-1].tables:
        report.notes += described(read_whole(store, manifests[-1], TABLE))
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


def _inputs(storage: Storage, manifests: list[Manifest], report: Report) -> None:
    """Checks the files that say what the run is, which must be as they were when the newest commit was made."""
    if not manifests:
        return
    newest, found = manifests[-1], input_digests(storage)
    for name in changed_inputs(newest, found):
        if name in found:
            report.problems.append(
                f"{name} in {storage.uri} is not what it was at the commit of round {newest.rounds_completed}: its "
                f"SHA-256 was {newest.inputs[name][:12]} and is {found[name][:12]}"
            )
        elif name != CONFIG:  # told elsewhere
            report.problems.append(f"{name} is missing from {storage.uri}")
    unknown = sorted(found.keys() - newest.inputs.keys())
    if unknown:
        report.notes.append(
            f"SHA-256 of {' and '.join(unknown)}: not recorded by the rayfl that made the newest commit"
        )


def _content(
    store: CommitStore, manifest: Manifest, file: StoredFile, partition: str | None, report: Report
) -> list[str]:
    """Returns what is wrong with the content of a file of a commit."""
    try:
        data = store.read(file)
        report.files, report.bytes = report.files + 1, report.bytes + len(data)
        name = next((name for name, parts in manifest.tables.items() if file in parts), None)
        if name is not None:
            return _table(f"{FOLDER}/{file.name}", name, data, partition)
        tree = treefile.loads(data, f"{FOLDER}/{file.name}")
    except RayflError as error:
        return [str(error)]
    absent = [path for path in manifest.parts_by_file().get(file, ()) if not has_part(tree, path)]
    if absent:
        return [f"{FOLDER}/{file.name} lacks {len(absent)} parts of the server's tree, such as {absent[0]}"]
    owners = {str(client) for client, held in manifest.states.items() if held == file}
    missing = sorted(owners - set(tree), key=int)
    return [f"{FOLDER}/{file.name} lacks the states of clients {', '.join(missing)}"] if missing else []


def _table(place: str, name: str, data: bytes, partition: str | None) -> list[str]:
    """Returns what is wrong with a table of results."""
    try:
        table = from_parquet(data)
        foreign = name in ALL_TABLES and not known_schema(name, table.schema)
    except (pa.ArrowException, OSError, ValueError) as error:
        return [f"{place} is damaged: {error}"]
    if foreign:
        return [f"{place} has other columns than a table of {name}"]
    written = (table.schema.metadata or {}).get(PARTITION_KEY, b"").decode(errors="replace")
    if partition is not None and written != partition:
        return [f"{place} is of a run on other data: partition.parquet has hash {partition[:12]}, it {written[:12]}"]
    return []


def _published(storage: Storage, manifests: list[Manifest], partition: str | None, report: Report) -> None:
    """The tables beside the commits: all that the newest commit has, or, as after ``rayfl fork``, none yet."""
    expected = manifests[-1].tables if manifests else {}
    lacking = [name for name in ALL_TABLES if name in expected and not storage.exists(f"{name}.parquet")]
    if expected and len(lacking) == len(expected):
        report.notes.append(f"{storage.uri} has no tables beside {FOLDER}/: `rayfl run` with the folder writes them")
        return
    for name in ALL_TABLES:
        if name in lacking:
            report.problems.append(
                f"{name}.parquet is missing from {storage.uri}: `rayfl run` with the folder writes it again"
            )
            continue
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
                    "command that started the run writes it again"
                ]
        report.problems += found


def _committed(store: CommitStore, manifest: Manifest, name: str, data: bytes) -> bool:
    """Returns whether a file has the rows of the commit and no others; while a run goes on it may have fewer."""
    if name not in manifest.tables:
        return False
    if [hashlib.sha256(data).hexdigest()] == [part.sha256 for part in manifest.tables.get(name, ())]:
        return True  # as in runs of before there were parts, which were written with other settings
    mine = pq.read_metadata(io.BytesIO(data))
    expected = to_one_parquet(_first(read_parts(store, manifest, name), mine.num_rows), from_parquet(data).schema)
    if data == expected:
        return True
    # Another version of Arrow writes the same rows in other bytes.
    versions = {file.created_by for file in (mine, pq.read_metadata(io.BytesIO(expected)))}
    return len(versions) > 1 and same_rows(from_parquet(data), from_parquet(expected))


def _copies(storage: Storage, manifests: list[Manifest], report: Report) -> None:
    """The second copies, where the run has them."""
    try:
        copy = copy_by_config(storage)
    except RunError:
        return  # what is wrong with config.yaml is told elsewhere
    if copy is None:
        return
    if report.problems:
        report.notes.append(f"what is whole in {copy.uri} the next start restores from there")
    files = sorted({file for manifest in manifests for file in manifest.stored()}, key=lambda file: file.name)
    names = [NEWEST, *(manifest_name(manifest.rounds_completed) for manifest in manifests)]
    paths = [*sorted(BEGINNING), *(f"{FOLDER}/{name}" for name in names)]
    others = [path for path in paths if storage.exists(path) and not _same(storage, copy, path)]
    found = [f"{path} in {copy.uri} is missing, or no copy of the run's" for path in others]
    found += damage_in(copy, files, thoroughly=True, copied=True).values()
    report.problems += [f"{problem}; the next start makes it again" for problem in found]


def _same(storage: Storage, copy: Storage, name: str) -> bool:
    return copy.exists(name) and copy.read(name) == storage.read(name)


def _first(parts: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    for part in parts:
        yield part.slice(0, rows)
        rows -= min(rows, part.num_rows)
