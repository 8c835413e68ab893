"""Many small files, in a folder or in a zip archive that is read without being unpacked."""

from __future__ import annotations

import os
import re
import stat
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

from rayfl.errors import DataError

_MOST_MEMBERS = 4_000_000
_ENCRYPTED = 0x1
_ABSOLUTE = re.compile(r"^(?:/|[A-Za-z]:)")


class FileTree(ABC):
    """Files by their names relative to the root, with ``/`` between folders.

    Args:
        root: the folder or archive.
        limit: the most bytes that a file may have.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self.root = root
        self._limit = limit

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All files, sorted.

        Raises:
            DataError: the root cannot be listed, or a name or a link leads out of it.
        """
        return tuple(sorted(self._names()))

    def place(self, name: str) -> str:
        """The file as errors name it."""
        return f"{self.root}/{name}"

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A file's content; raises DataError if it is missing, unreadable or larger than the limit."""

    @abstractmethod
    def _names(self) -> Iterator[str]: ...

    def _bounded(self, content: bytes, name: str) -> bytes:
        if len(content) > self._limit:
            raise self._too_large(name)
        return content

    def _too_large(self, name: str) -> DataError:
        return DataError(f"{self.place(name)} is larger than {self._limit:,} bytes; no file of this data set is")


class FolderTree(FileTree):
    """Files below a folder, none of them a link."""

    def read(self, name: str) -> bytes:
        try:
            with (self.root / name).open("rb") as file:
                return self._bounded(file.read(self._limit + 1), name)
        except OSError as error:
            raise DataError(f"{self.place(name)} cannot be read: {error}; check that it is there") from error

    def _names(self) -> Iterator[str]:
        yield from self._below("")

    def _below(self, folder: str) -> Iterator[str]:
        try:
            with os.scandir(self.root / folder) as entries:
                for entry in entries:
                    name = f"{folder}{entry.name}"
                    if entry.is_symlink():
                        raise DataError(f"{self.place(name)} is a link; put the file or folder itself there")
                    if entry.is_dir():
                        yield from self._below(f"{name}/")
                    elif entry.is_file():
                        yield name
        except OSError as error:
            raise DataError(f"{self.place(folder)} cannot be listed: {error}; check that it is there") from error


class ZipTree(FileTree):
    """Files in a zip archive, none of which has a name outside it, is a link or is encrypted."""

    def __init__(self, root: Path, limit: int) -> None:
        super().__init__(root, limit)
        try:
            self._archive = zipfile.ZipFile(root)
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{root} is not a readable zip archive: {error}; fetch it again") from error

    def read(self, name: str) -> bytes:
        try:
            # The size that the archive declares may be a lie: no more than the limit is ever unpacked.
            with self._archive.open(name) as file:
                return self._bounded(file.read(self._limit + 1), name)
        except (OSError, KeyError, NotImplementedError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{self.place(name)} cannot be read: {error}; fetch the archive again") from error

    def _names(self) -> Iterator[str]:
        members = self._archive.infolist()
        if len(members) > _MOST_MEMBERS:
            raise DataError(f"{self.root} has {len(members):,} members; no archive of this data set is that large")
        seen: set[str] = set()
        for member in members:
            if member.is_dir():
                continue
            name = member.filename
            if problem := _unsafe(member):
                raise DataError(f"{self.root}: the member {name!r} {problem}; do not use this archive")
            if name in seen:
                raise DataError(f"{self.root}: the member {name!r} is there twice; do not use this archive")
            if member.file_size > self._limit:
                raise self._too_large(name)
            seen.add(name)
            yield name


def open_tree(path: Path, limit: int) -> FileTree:
    """The files of a folder or of a zip archive.

    Args:
        path: a folder, or a file that is a zip archive.
        limit: the most bytes that a file may have.

    Raises:
        DataError: neither a folder nor a zip archive.
    """
    if path.is_dir():
        return FolderTree(path, limit)
    if path.is_file():
        return ZipTree(path, limit)
    raise DataError(f"{path} does not exist; give a folder or a zip archive")


def _unsafe(member: zipfile.ZipInfo) -> str:
    """Returns what is wrong with a member, or nothing."""
    name = member.filename
    if _ABSOLUTE.match(name) or "\\" in name or ".." in PurePosixPath(name).parts:
        return "leads out of the archive"
    if stat.S_ISLNK(member.external_attr >> 16):
        return "is a link"
    if member.flag_bits & _ENCRYPTED:
        return "is encrypted"
    return ""
