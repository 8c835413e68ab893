"""Files of a run on any pyarrow file system: local disk, NFS, S3, GCS."""

from __future__ import annotations

import os
import posixpath
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pyarrow import fs

from rayfl.errors import RunError


@dataclass(frozen=True)
class Storage:
    """A folder on a pyarrow file system; all paths are relative to it.

    Attributes:
        uri: what the user wrote: a local path or a URI such as ``s3://bucket/folder``.
    """

    uri: str

    @property
    def _located(self) -> tuple[fs.FileSystem, str]:
        if "://" not in self.uri:
            return fs.LocalFileSystem(), str(Path(self.uri).expanduser().absolute())
        try:
            filesystem, path = fs.FileSystem.from_uri(self.uri)
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"storage_path {self.uri!r} cannot be used: {error}") from error
        return filesystem, path

    @property
    def local_path(self) -> Path | None:
        """The folder on a local (or mounted) disk, None on an object store."""
        filesystem, path = self._located
        return Path(path) if isinstance(filesystem, fs.LocalFileSystem) else None

    def inside(self, folder: str) -> Storage:
        """A sub-folder."""
        if "://" not in self.uri:
            return Storage(f"{self.uri.rstrip('/')}/{folder}")
        # Options of a URI (s3://bucket/runs?region=...) stay at its end.
        address, mark, options = self.uri.partition("?")
        return Storage(f"{address.rstrip('/')}/{quote(folder)}{mark}{options}")

    def write(self, path: str, data: bytes) -> None:
        """Writes a file so that readers see the old content or the new, never a part, and it survives power loss.

        Raises:
            RunError: when the file cannot be written (no space, no permission), naming it.
        """
        filesystem, base = self._located
        target = posixpath.join(base, path)
        with _reported("write", target):
            if isinstance(filesystem, fs.LocalFileSystem):
                _write_local(Path(target), data)
            else:
                with filesystem.open_output_stream(target) as stream:
                    stream.write(data)

    def read(self, path: str) -> bytes:
        """The content of a file.

        Raises:
            FileNotFoundError: when there is none.
            RunError: when it cannot be read, naming it.
        """
        filesystem, base = self._located
        target = posixpath.join(base, path)
        with _reported("read", target, FileNotFoundError), filesystem.open_input_stream(target) as stream:
            data: bytes = stream.read()
        return data

    def exists(self, path: str) -> bool:
        """Whether there is a file (or folder) of this name."""
        filesystem, base = self._located
        target = posixpath.join(base, path)
        with _reported("read", target):
            found: bool = filesystem.get_file_info(target).type != fs.FileType.NotFound
        return found

    def names(self, folder: str) -> list[str]:
        """The names of the files in a folder, sorted; empty when there is no such folder."""
        filesystem, base = self._located
        target = posixpath.join(base, folder)
        with _reported("read", target):
            infos = filesystem.get_file_info(fs.FileSelector(target, allow_not_found=True))
        return sorted(info.base_name for info in infos if info.type == fs.FileType.File)

    def delete(self, path: str) -> None:
        """Deletes a file; one that is gone already is no error."""
        filesystem, base = self._located
        target = posixpath.join(base, path)
        with _reported("delete", target), suppress(FileNotFoundError):
            filesystem.delete_file(target)


@contextmanager
def _reported(action: str, target: str, *passing: type[OSError]) -> Iterator[None]:
    """Says which file a failure is about; ``passing`` errors stay as they are."""
    try:
        yield
    except passing:
        raise
    except OSError as error:
        raise RunError(f"cannot {action} {target}: {error.strerror or error}") from error


def _write_local(target: Path, data: bytes) -> None:
    created = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # A new name survives power loss once the folder that holds it is on the disk.
    for folder in (target.parent, *(folder.parent for folder in created)):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
