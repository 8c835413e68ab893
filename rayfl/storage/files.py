"""Files of a run on any pyarrow file system: local disk, NFS, S3, GCS."""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote

from pyarrow import fs

from rayfl.errors import RunError
from rayfl.storage.local_files import delete_local, link_local, write_local

_CHUNK_BYTES = 1 << 24
SETTLE_S = 2.0
"""Seconds that another writer may take between checking that an object does not exist and writing it."""


@dataclass(frozen=True)
class Storage:
    """A folder on a pyarrow file system. All paths are relative to it, and none leads out of it.

    Attributes:
        uri: the local path or URI that the user gave, such as ``s3://bucket/folder``.
    """

    uri: str

    @property
    def _located(self) -> tuple[fs.FileSystem, str]:
        if "://" not in self.uri:
            return fs.LocalFileSystem(), str(Path(self.uri).expanduser().absolute())
        try:
            return _opened(self.uri)
        except (OSError, ValueError, TypeError) as error:
            raise RunError(f"storage_path {self.uri!r} cannot be used: {error}") from error

    @property
    def local_path(self) -> Path | None:
        """The folder on a local (or mounted) disk, None on an object store."""
        filesystem, path = self._located
        return Path(path) if isinstance(filesystem, fs.LocalFileSystem) else None

    def inside(self, folder: str) -> Storage:
        """A sub-folder, by its name.

        Raises:
            RunError: when the name would lead elsewhere.
        """
        if "/" in _checked(folder):
            raise RunError(f"{folder!r} is no name of a folder: it must not have '/'")
        if "://" not in self.uri:
            return Storage(f"{self.uri.rstrip('/')}/{folder}")
        # Options of a URI (s3://bucket/runs?region=...) stay at its end.
        address, mark, options = self.uri.partition("?")
        return Storage(f"{address.rstrip('/')}/{quote(folder)}{mark}{options}")

    def _target(self, path: str) -> tuple[fs.FileSystem, str]:
        filesystem, base = self._located
        return filesystem, posixpath.join(base, _checked(path))

    def write(self, path: str, data: bytes) -> None:
        """Writes a file atomically and durably: readers see the old or the new content, and it survives power loss.

        Raises:
            RunError: when the file cannot be written (no space, no permission), naming it.
        """
        filesystem, target = self._target(path)
        with _as_run_error("write", target):
            if isinstance(filesystem, fs.LocalFileSystem):
                write_local(Path(target), data)
            else:
                with filesystem.open_output_stream(target) as stream:
                    stream.write(data)

    def create(self, path: str, data: bytes) -> bool:
        """Creates a file that must not exist yet; returns whether it did. Of several concurrent writers one succeeds.

        On disks, network file systems included, a hard link guarantees that. Without hard links, as in an object
        store, the file is written and read back after two seconds. The writer that finds its own content has won, so
        ``data`` must differ from that of all others. A writer that was delayed for longer between the check and the
        write may still replace the file: read it again before something depends on it.

        Raises:
            RunError: when the file cannot be written, naming it.
        """
        filesystem, target = self._target(path)
        if isinstance(filesystem, fs.LocalFileSystem):
            with _as_run_error("write", target):
                created = link_local(Path(target), data)
            if created is not None:
                return created
        if self.exists(path):
            return False
        self.write(path, data)
        time.sleep(SETTLE_S)
        try:
            return self.read(path) == data
        except FileNotFoundError:
            return False

    def read(self, path: str) -> bytes:
        """Returns the content of a file.

        Raises:
            FileNotFoundError: when there is none.
            RunError: when it cannot be read, naming it.
        """
        filesystem, target = self._target(path)
        # Of a file the size is known: a stream is read in chunks, which are then joined, so that it is there twice.
        known = isinstance(filesystem, fs.LocalFileSystem)
        opened = filesystem.open_input_file if known else filesystem.open_input_stream
        with _as_run_error("read", target, FileNotFoundError), opened(target) as stream:
            data: bytes = stream.read()
        return data

    def exists(self, path: str) -> bool:
        """Returns whether there is a file (or folder) of this name."""
        filesystem, target = self._target(path)
        with _as_run_error("read", target):
            found: bool = filesystem.get_file_info(target).type != fs.FileType.NotFound
        return found

    def digest(self, path: str) -> str:
        """Returns the SHA-256 of a file's content, which need not fit into memory.

        Raises:
            FileNotFoundError: when there is none.
            RunError: when it cannot be read, naming it.
        """
        filesystem, target = self._target(path)
        digest = hashlib.sha256()
        with _as_run_error("read", target, FileNotFoundError), filesystem.open_input_stream(target) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def modified(self, path: str) -> float:
        """Returns the time at which a file was written, in seconds by the storage's clock.

        Raises:
            FileNotFoundError: when there is none.
        """
        filesystem, target = self._target(path)
        with _as_run_error("read", target):
            info = filesystem.get_file_info(target)
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(errno.ENOENT, "no such file", target)
        return float(info.mtime_ns) / 1e9

    def names(self, folder: str | None = None) -> list[str]:
        """The names of the files in a folder (None: this one), sorted; empty when there is no such folder."""
        return sorted(info.base_name for info in self._infos(folder) if info.type == fs.FileType.File)

    def folders(self, folder: str | None = None) -> list[str]:
        """The names of the folders in a folder (None: this one), sorted; empty when there is no such folder."""
        return sorted(info.base_name for info in self._infos(folder) if info.type == fs.FileType.Directory)

    def sizes(self, folder: str) -> dict[str, int]:
        """The files in a folder with their sizes in bytes, by name; empty when there is no such folder."""
        return {info.base_name: info.size for info in self._infos(folder) if info.type == fs.FileType.File}

    def entries(self) -> list[str]:
        """The names of all files and folders that lie directly in this folder, sorted; empty when there is none."""
        return sorted(info.base_name for info in self._infos(None))

    def _infos(self, folder: str | None) -> list[fs.FileInfo]:
        filesystem, target = self._located if folder is None else self._target(folder)
        with _as_run_error("read", target):
            found: list[fs.FileInfo] = filesystem.get_file_info(fs.FileSelector(target, allow_not_found=True))
        return found

    def link_target(self, path: str) -> str | None:
        """Returns where a link of this name leads; None for anything else. Only disks have links."""
        local = self.local_path
        if local is None or not (place := local / _checked(path)).is_symlink():
            return None
        with _as_run_error("read", str(place)):
            return os.readlink(place)

    def delete(self, path: str) -> None:
        """Deletes a file, never one that is reached through a link below this folder; a missing one is no error.

        Raises:
            RunError: when it cannot be deleted, naming it.
        """
        filesystem, target = self._target(path)
        with _as_run_error("delete", target), suppress(FileNotFoundError):
            if isinstance(filesystem, fs.LocalFileSystem):
                delete_local(Path(self._located[1]), path)
            else:
                filesystem.delete_file(target)


def absolute(place: str) -> str:
    """Returns a local folder as it is called in every process, whatever its working or home folder; a URI unchanged."""
    return place if "://" in place else str(Path(place).expanduser().absolute())


@lru_cache(maxsize=32)
def _opened(uri: str) -> tuple[fs.FileSystem, str]:
    """Returns the file system of a URI, and the path in it; one client of a store serves all operations."""
    if uri.startswith("s3://") and "allow_delayed_open=" not in uri:
        # Small objects are then written by one request instead of three.
        uri += f"{'&' if '?' in uri else '?'}allow_delayed_open=true"
    filesystem, path = fs.FileSystem.from_uri(uri)
    return filesystem, path


def _checked(path: str) -> str:
    """Returns a path that stays inside the folder; refuses others, since names may come from others' files."""
    if not path or "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise RunError(f"{path!r} is no path inside a run's folder")
    return path


@contextmanager
def _as_run_error(action: str, target: str, *passing: type[OSError]) -> Iterator[None]:
    """Turns an OSError into a RunError that names the file, except for the types in ``passing``."""
    try:
        yield
    except passing:
        raise
    except OSError as error:
        raise RunError(f"cannot {action} {target}: {error.strerror or error}") from error
