"""Recognizes files of rayfl in a run's folder by their names: the only files that it may delete there."""

from __future__ import annotations

import re
from collections.abc import Callable

from rayfl.results.schemas import ALL_TABLES

_UNIQUE = "(?:-[0-9a-f]{8})?"  # the first formats had none
_OF_COMMIT = re.compile(
    rf"(?:(?:server|parts)-\d{{6,}}|states-\d{{6,}}-\d{{4,}}){_UNIQUE}\.safetensors"
    rf"|(?:{'|'.join(ALL_TABLES)})-\d{{6,}}{_UNIQUE}\.parquet"
)
_MANIFEST = re.compile(r"manifest-(\d{6,})\.json")
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]+\.(?:tmp|new)")
_PROBE = re.compile(r"\.probe-[0-9a-f]{32}(?:-[0-9a-f]+)?")
_LEASE = re.compile(r"lease\.json|\.lease-(?:after-)?[0-9a-f]{32}")

NEWEST = "newest.json"
"""Name of the file that says which manifest is the newest."""

BEGINNING = frozenset({"config.yaml", "partition.parquet", "devices.parquet", "initial.safetensors"})
"""Files of a run's first start, ``config.yaml`` last: without it the start was interrupted."""

_LATER = frozenset(
    {"timings.jsonl", "costs.jsonl", "environment.json", "result.json", "progress.csv", "mlflow_run.txt"}
    | {f"{name}.parquet" for name in ALL_TABLES}
)


def is_of_commits(name: str) -> bool:
    """Returns whether a file in ``commits/`` is rayfl's by its name: of a commit, finished or not, or temporary."""
    return _is_finished(name) or is_temporary(name, _is_finished)


def _is_finished(name: str) -> bool:
    return name == NEWEST or _OF_COMMIT.fullmatch(name) is not None or manifest_rounds(name) is not None


def manifest_rounds(name: str) -> int | None:
    """Returns the completed rounds of a manifest of this name; None for other names."""
    found = _MANIFEST.fullmatch(name)
    return None if found is None else int(found[1])


def rounds_in(name: str) -> int | None:
    """Returns the completed rounds of a commit's file of this name; None for other names."""
    return int(name.split("-")[1].partition(".")[0]) if _OF_COMMIT.fullmatch(name) else None


def is_temporary(name: str, owns: Callable[[str], bool]) -> bool:
    """Returns whether this is a temporary name of a file whose final name ``owns`` accepts."""
    found = _TEMPORARY.fullmatch(name)
    # A file that must not exist yet is written under two temporary names.
    return found is not None and (owns(found[1]) or is_temporary(found[1], owns))


def is_of_run(name: str) -> bool:
    """Returns whether a file beside ``commits/`` is one that only the holder of the run's lease writes."""
    return name in BEGINNING | _LATER


def is_probe(name: str) -> bool:
    """Returns whether this file only tests that a folder can be written, or is the same place on all nodes."""
    return _PROBE.fullmatch(name) is not None


def is_lease(name: str) -> bool:
    """Returns whether this file belongs to the run's lease, which any driver may be writing."""
    return _LEASE.fullmatch(name) is not None
