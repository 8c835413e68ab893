"""What is prepared in a data root, and whether it is still what it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayfl.data.files.content import ContentHash
from rayfl.data.files.natural_file import METADATA_KEY, NaturalFile, open_natural
from rayfl.data.files.records import read_record
from rayfl.data.files.whole import file_digest
from rayfl.data.sources.preparation.pooled_file import PooledFile
from rayfl.data.sources.preparation.preparing import PREPARED
from rayfl.errors import DataError
from rayfl.examples import Target

_ROWS = 4096


@dataclass(frozen=True)
class Entry:
    """A prepared file.

    Attributes:
        path: the file.
        kind: the data set.
        content: samples, clients, shape and classes, in words; or what is wrong with the file.
        size: bytes.
        source: what it was made from; empty where that is not on record.
    """

    path: Path
    kind: str
    content: str
    size: int
    source: str


def prepared_files(root: Path) -> list[Path]:
    """The prepared files and imported Parquet files of a data root, sorted."""
    arrow = sorted((root / PREPARED).glob("*.arrow"))
    return arrow + [path for path in sorted(root.glob("*.parquet")) if _is_ours(path)]


def inventory(root: Path) -> list[Entry]:
    """Returns what is prepared in a data root."""
    return [_entry(path) for path in prepared_files(root)]


def verify(path: Path) -> tuple[list[str], list[str]]:
    """Compares a prepared file with its record and its own header, and the files it was made from with the record.

    Args:
        path: the prepared file.

    Returns:
        What is wrong, and what could not be compared.
    """
    wrong: list[str] = []
    unknown: list[str] = []
    try:
        opened = _open(path)
        record = read_record(path)
        found = opened.content_hash() if isinstance(opened, PooledFile) else _content_hash(opened)
    except (DataError, OSError, pa.ArrowException) as error:
        return [str(error)], []
    if opened.header.sha256 is None and record is None:
        unknown.append("the file does not name the checksum of its content, which is readable")
    elif opened.header.sha256 is not None and found != opened.header.sha256:
        wrong.append(f"the content has the sha256 {found}, but its header says {opened.header.sha256}")
    if record is None:
        unknown.append("there is no record of the file's checksum")
        return wrong, unknown
    if (digest := file_digest(path)) != record.sha256:
        wrong.append(f"the file has the sha256 {digest}, but its record says {record.sha256}")
    if opened.header.sha256 is None and found != record.content:
        wrong.append(f"the content has the sha256 {found}, but its record says {record.content}")
    if opened.header.sha256 not in (None, record.content):
        wrong.append("the record is of another content")
    for file in record.files:
        if not file.path.exists():
            unknown.append(f"{file.path}, which it was made from, is gone")
        elif file_digest(file.path) != file.sha256:
            wrong.append(f"{file.path} has changed since the file was made from it")
    return wrong, unknown


def _is_ours(path: Path) -> bool:
    try:
        return METADATA_KEY in (pq.read_schema(path).metadata or {})
    except (OSError, pa.ArrowException):
        return False


def _open(path: Path) -> PooledFile | NaturalFile:
    if path.suffix == ".arrow":
        try:
            metadata = pa.ipc.open_file(pa.memory_map(str(path))).schema.metadata or {}
            pooled = json.loads(metadata.get(METADATA_KEY, b"{}")).get("format") != "natural"
        except (OSError, ValueError, AttributeError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {str(error).strip()}") from error
        if pooled:
            return PooledFile(path)
    return open_natural(path)


def _entry(path: Path) -> Entry:
    size = path.stat().st_size
    try:
        opened = _open(path)
        record = read_record(path)
        content = _words(opened)
    except (DataError, OSError, pa.ArrowException) as error:
        return Entry(path, path.stem, f"damaged: {error}", size, "")
    return Entry(path, opened.header.kind, content, size, "" if record is None else record.source)


_KINDS: dict[Target, str] = {
    "class": "classes",
    "labels": "labels",
    "values": "numbers to predict",
    "tokens": "tokens to choose from",
    "mask": "classes of pixels",
    "survival": "risk of an event",
    "preference": "tokens to choose from, pairs of answers",
    "ranking": "score of an item",
    "nodes": "classes of nodes",
    "forecast": "numbers to forecast",
}


def _words(opened: PooledFile | NaturalFile) -> str:
    header = opened.header
    inputs = f"{' x '.join(map(str, header.shape))}, {header.num_classes} {_KINDS[header.target]}"
    if isinstance(opened, PooledFile):
        return f"{' + '.join(f'{part.rows:,} {name}' for name, part in opened.header.parts.items())}, {inputs}"
    clients = len(opened.owners().column("client").unique())
    return f"{len(opened):,} samples of {clients:,} client{'s' * (clients > 1)}, {inputs}"


def _content_hash(file: NaturalFile) -> str:
    owners = file.owners()
    digest = ContentHash()
    for start in range(0, len(file), _ROWS):
        stop = min(start + _ROWS, len(file))
        x, y = file.rows(start, stop)
        digest.update(x, y, _names(owners.slice(start, stop - start)))
    return digest.hexdigest()


def _names(owners: pa.Table) -> Iterator[str]:
    for client, split in zip(owners.column("client").to_pylist(), owners.column("split").to_pylist(), strict=True):
        yield from (client, split)
