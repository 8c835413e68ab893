"""Reads and writes the files of commits in the run's folder and, if there is one, in its copy."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rayfl.errors import DamageError, RunError
from rayfl.storage.files import Storage
from rayfl.storage.manifest import StoredFile

FOLDER = "commits"
_READERS = 8

_log = logging.getLogger("rayfl")
Content = TypeVar("Content")


class CommitFiles:
    """Reads and writes files in the folder ``commits`` of a run.

    Args:
        storage: the run's folder.
        copy: a folder with a copy of every file, used if the first one is damaged; None for no copy.
    """

    def __init__(self, storage: Storage, copy: Storage | None = None) -> None:
        self.uri = storage.uri
        self._places = (storage,) if copy is None else (storage, copy)

    def write(self, name: str, data: bytes) -> StoredFile:
        """Writes a file, in both folders if there are two."""
        for place in self._places:
            place.write(f"{FOLDER}/{name}", data)
        return StoredFile(name=name, sha256=hashlib.sha256(data).hexdigest(), size=len(data))

    def exists(self, name: str) -> bool:
        """Returns whether the run's folder has this file."""
        return self._places[0].exists(f"{FOLDER}/{name}")

    def names(self) -> list[str]:
        """The names of all files in the run's folder, sorted."""
        return self._places[0].names(FOLDER)

    def delete(self, chosen: Callable[[str], bool], order: Callable[[str], bool]) -> None:
        """Deletes files, in both folders if there are two.

        Args:
            chosen: whether to delete a file, by name.
            order: by name; files for which it is false go first.
        """
        for place in self._places:
            for name in sorted(filter(chosen, place.names(FOLDER)), key=order):
                place.delete(f"{FOLDER}/{name}")

    def read(self, name: str, decode: Callable[[bytes, str], Content]) -> Content:
        """A file's content, from the copy where it is damaged in the run's folder.

        Args:
            name: name of the file.
            decode: converts the bytes, or raises DamageError; its second argument names the file in errors.

        Raises:
            RunError: when it cannot be read, or what ``decode`` raises.
            DamageError: when it is missing.
        """
        problem: RunError | None = None
        for place in self._places:
            try:
                content = decode(place.read(f"{FOLDER}/{name}"), _label(place, name))
            except FileNotFoundError:
                problem = problem or DamageError(_missing(place, name))
            except RunError as error:
                problem = problem or error
            else:
                if problem is not None:
                    _log.info("%s; its copy in %s is whole and used instead", problem, place.uri)
                return content
        assert problem is not None
        raise problem

    def read_stored(self, file: StoredFile) -> bytes:
        """The content of a file whose checksum is known; see :meth:`read`."""

        def verified(data: bytes, called: str) -> bytes:
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise DamageError(f"{called} is damaged: its SHA-256 has changed")
            return data

        return self.read(file.name, verified)

    def damage(self, files: Sequence[StoredFile], thoroughly: bool) -> dict[str, str]:
        """Returns a sentence for each damaged file, by name, except for files whose copy is whole.

        Args:
            files: the files.
            thoroughly: whether to read them all, and compare their checksums.
        """
        found: dict[str, str] = {}
        for place in self._places:
            wrong = damage_in(place, files, thoroughly, len(self._places) > 1)
            found = {name: found.get(name, problem) for name, problem in wrong.items()}
            files = [file for file in files if file.name in found]
        return found


def damage_in(place: Storage, files: Sequence[StoredFile], thoroughly: bool, copied: bool = False) -> dict[str, str]:
    """Returns a sentence for each damaged file in one folder, by name.

    Args:
        place: the folder of the run, or of its copies.
        files: the files.
        thoroughly: whether to read them all, and compare their checksums. They are read piece by piece, so that the
            memory this takes depends on no file's size; the log says how much it is.
        copied: whether there is another folder, so that a file that cannot be read counts as damaged. Else it may be
            read the next time, and nothing must be given up for it.

    Raises:
        RunError: when a file cannot be read.
    """
    sizes = place.sizes(FOLDER) if files else {}
    found, present = dict[str, str](), list[StoredFile]()
    for file in files:
        if file.name not in sizes:
            found[file.name] = _missing(place, file.name)
        elif file.size not in (0, sizes[file.name]):
            has = f"it has {sizes[file.name]} of {file.size} bytes"
            found[file.name] = f"{_label(place, file.name)} is damaged: {has}"
        else:
            present.append(file)

    def changed(file: StoredFile) -> str:
        try:
            same = place.digest(f"{FOLDER}/{file.name}") == file.sha256
        except RunError as error:
            if not copied:
                raise
            return str(error)
        return "" if same else f"{_label(place, file.name)} is damaged: its SHA-256 has changed"

    if thoroughly and present:
        size = sum(sizes[file.name] for file in present)
        _log.info("comparing checksums in %s/%s: %d files, %s bytes", place.uri, FOLDER, len(present), f"{size:,}")
        with ThreadPoolExecutor(_READERS) as readers:
            problems = readers.map(changed, present)
            found |= {file.name: problem for file, problem in zip(present, problems, strict=True) if problem}
    return found


def _label(place: Storage, name: str) -> str:
    return f"{FOLDER}/{name} in {place.uri}"


def _missing(place: Storage, name: str) -> str:
    return f"{FOLDER}/{name} is missing from {place.uri}"
