"""The manifest of a commit: its files and their checksums.

docs/commits.md has the format in full.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rayfl.errors import DamageError, RunError
from rayfl.naming.texts import FileName

FORMAT_VERSION = 5
"""The newest version that this rayfl reads."""
_WITHOUT_PARTS = 4
"""The version of commits whose server's tree is in one file."""
ENDED_EARLY = "ended_early"
"""The counter of a run that has ended before its last round."""
CLIP_NORM = "clip_norm"
"""Beside the counters: the clipping norm of the next round, where it has moved (``privacy.target_quantile``)."""
_WITHOUT_CHECKSUM = 1
"""The version whose manifests do not have a checksum of their own."""


class StoredFile(BaseModel):
    """A file of a commit, its checksum and its size in bytes (0 in commits of before sizes were noted)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Manifests may come from others: a name never leads out of the folder.
    name: FileName
    sha256: str
    size: int = Field(0, ge=0)


def _in_parts(value: Any) -> Any:
    return [value] if isinstance(value, Mapping | StoredFile) else value


TableFiles = Annotated[tuple[StoredFile, ...], BeforeValidator(_in_parts), Field(min_length=1)]
"""The files that make up a table, in the order of their rows; in versions 1 and 2 the one file that it was."""


class Manifest(BaseModel):
    """One commit.

    Attributes:
        version: version of the format.
        rounds_completed: number of completed rounds.
        fingerprint: fingerprint of the run's configuration.
        server: file of the server's tree.
        server_parts: by path, the files of what that file lacks of the tree.
        states: file with the newest state, by client id.
        tables: Parquet files of each table by its name, in the order of their rows.
        counters: totals since the start, such as bytes sent; and a clipping norm that moves.
        inputs: SHA-256 of the files that identify the run, by name; none in commits before version 4.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = _WITHOUT_PARTS
    rounds_completed: int = Field(ge=0)
    fingerprint: str
    server: StoredFile
    server_parts: dict[str, StoredFile] = {}
    states: dict[int, StoredFile] = {}
    tables: dict[str, TableFiles] = {}
    counters: dict[str, int | float] = {}
    inputs: dict[str, str] = {}

    @property
    def ended_early(self) -> bool:
        """Returns whether the run has ended with this commit, before its last round."""
        return bool(self.counters.get(ENDED_EARLY))

    @property
    def clip_norm(self) -> float | None:
        """Returns the clipping norm of the next round; None where it is the first one."""
        return self.counters.get(CLIP_NORM)

    def files(self) -> set[str]:
        """The names of all files of this commit but the manifest itself."""
        return {file.name for file in self._all()}

    def table_files(self) -> dict[str, StoredFile]:
        """The parts of all tables, by their names."""
        return {part.name: part for parts in self.tables.values() for part in parts}

    def without(self, names: Container[str]) -> Manifest:
        """Returns the commit without these parts of tables, and without tables of which no part is left."""
        tables = {
            table: tuple(part for part in parts if part.name not in names) for table, parts in self.tables.items()
        }
        return self.model_copy(update={"tables": {table: parts for table, parts in tables.items() if parts}})

    def clients_in(self, names: Container[str]) -> list[int]:
        """The clients whose newest states are in files of these names, ascending."""
        return sorted(client for client, file in self.states.items() if file.name in names)

    def stored(self) -> list[StoredFile]:
        """The files of this commit but the manifest itself, each once, by name."""
        return sorted(self._all(), key=lambda file: file.name)

    def _all(self) -> set[StoredFile]:
        tables = (part for parts in self.tables.values() for part in parts)
        return {*self.server_files, *self.states.values(), *tables}

    def parts_by_file(self) -> dict[StoredFile, list[str]]:
        """The paths of the server's parts, by the file that has them."""
        found: dict[StoredFile, list[str]] = {}
        for path, file in self.server_parts.items():
            found.setdefault(file, []).append(path)
        return found

    @property
    def server_files(self) -> frozenset[StoredFile]:
        """The files that make up the server's tree."""
        return frozenset({self.server, *self.server_parts.values()})

    @property
    def state_bytes(self) -> int:
        """Size of the files that hold the client states."""
        return sum({file.name: file.size for file in self.states.values()}.values())


def version_of(server_parts: Mapping[str, StoredFile]) -> int:
    """The version of the format of a commit with these parts of the server's tree, or none."""
    return FORMAT_VERSION if server_parts else _WITHOUT_PARTS


def manifest_name(rounds_completed: int) -> str:
    """The manifest's file."""
    return f"manifest-{rounds_completed:06d}.json"


def with_checksum(manifest: Manifest) -> dict[str, Any]:
    """Returns the content of a manifest's file: the manifest and its checksum."""
    content = manifest.model_dump(mode="json")
    if not manifest.server_parts:
        del content["server_parts"]  # as in version 4
    return content | {"checksum": _checksum(content)}


def parse(name: str, data: bytes, place: str) -> Manifest:
    """A manifest from its file.

    Args:
        name: of the file.
        data: its content.
        place: what to call it in errors.

    Raises:
        DamageError: when it was changed or is no manifest.
        RunError: when it is of another format version.
    """
    try:
        content: dict[str, Any] = json.loads(data)
        version, checksum = content.get("version"), content.pop("checksum", None)
    except (ValueError, AttributeError, RecursionError) as error:
        raise DamageError(f"{place} is damaged: {error}") from error
    # Every version from 2 on has the same checksum, so that a newer one can be told from a damaged one.
    if type(version) is not int or version < _WITHOUT_CHECKSUM:
        raise DamageError(f"{place} is damaged: it has no format version")
    if version != _WITHOUT_CHECKSUM and checksum != _checksum(content):
        raise DamageError(f"{place} is damaged: its SHA-256 has changed")
    if version > FORMAT_VERSION:
        raise RunError(
            f"{place} has format version {version}, this rayfl reads up to {FORMAT_VERSION}: continue the run with the "
            "rayfl that started it"
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise DamageError(f"{place} is damaged: {error}") from error
    if name != manifest_name(manifest.rounds_completed):
        raise DamageError(f"{place} is damaged: it is the manifest of round {manifest.rounds_completed}")
    return manifest


def newest_rounds(data: bytes, called: str) -> int:
    """Returns what ``newest.json`` says; raises DamageError when it says nothing."""
    try:
        return int(json.loads(data)["rounds_completed"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamageError(f"{called} is damaged: {error}") from error


def _checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its checksum: of its JSON with sorted keys and without spaces."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class CheckedCommit:
    """A commit and its damaged files.

    Attributes:
        manifest: manifest of the commit.
        lost: a sentence for each damaged file, by name.
    """

    manifest: Manifest
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def trainable(self) -> bool:
        """Returns whether models and states are whole: at most rows of tables are lost."""
        return self.lost.keys() <= self.manifest.table_files().keys()

    @property
    def has_server(self) -> bool:
        """Returns whether the server's model is whole."""
        return not any(file.name in self.lost for file in self.manifest.server_files)
