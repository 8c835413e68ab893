"""What is known of a prepared file, in ``<file>.json`` beside it: checksums, and what it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from rayfl.data.files.whole import file_digest, new_file
from rayfl.errors import DataError


class SourceFile(BaseModel):
    """A file that samples were read from.

    Attributes:
        path: where it was.
        sha256: its checksum.
        bytes: its size.
    """

    model_config = ConfigDict(frozen=True)

    path: Path
    sha256: str
    bytes: int

    @classmethod
    def of(cls, path: Path) -> SourceFile:
        """A file as it is now."""
        return cls(path=path.absolute(), sha256=file_digest(path), bytes=path.stat().st_size)


class Record(BaseModel):
    """The record of a prepared file.

    Attributes:
        sha256: checksum of the prepared file.
        content: checksum of the samples, the same in any file that holds them.
        source: where they came from, in words.
        files: what they were read from.
        options: the options of the source that chose them.
        made: date and time, UTC.
    """

    model_config = ConfigDict(frozen=True)

    sha256: str
    content: str
    source: str
    files: tuple[SourceFile, ...]
    options: dict[str, Any]
    made: datetime


def record_path(prepared: Path) -> Path:
    """Returns where the record of a prepared file is."""
    return prepared.with_name(f"{prepared.name}.json")


def write_record(
    prepared: Path, content: str, source: str, files: tuple[SourceFile, ...], options: Mapping[str, Any]
) -> Record:
    """Writes the record of a file that has just been prepared."""
    record = Record(
        sha256=file_digest(prepared),
        content=content,
        source=source,
        files=files,
        options=dict(options),
        made=datetime.now(UTC).replace(microsecond=0),
    )
    with new_file(record_path(prepared)) as file:
        file.write(record.model_dump_json(indent=1).encode())
    return record


def drop_record(prepared: Path) -> None:
    """Deletes the record of a file that is about to be replaced, so that it is never taken for that of the new one.

    Raises:
        DataError: it cannot be deleted, or a file of its name is no record and so somebody else's.
    """
    path = record_path(prepared)
    try:
        read_record(prepared)
    except DataError:
        raise DataError(
            f"{path} is no record of rayfl's, and what is known of {prepared.name} belongs there; move it away, or "
            "choose another destination"
        ) from None
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path} cannot be deleted: {error}; choose another destination") from error


def read_record(prepared: Path) -> Record | None:
    """The record of a prepared file; None where there is none.

    Raises:
        DataError: the record is damaged.
    """
    path = record_path(prepared)
    try:
        return Record.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is damaged; make {prepared.name} again with `rayfl data prepare --force`, or import it again"
        ) from error
