"""Files that appear under their names only when they are complete, checksums, and one writer at a time."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from rayfl.errors import DataError

_BLOCK = 1 << 20


@contextmanager
def new_file(destination: Path) -> Iterator[BinaryIO]:
    """A file to write; it takes its name, also from an older one, when the block ends, and is on the disk then.

    Args:
        destination: the file's name; a missing folder is made.

    Raises:
        DataError: the file cannot be written; nothing is left behind.
    """
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            put(partial, destination)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{destination} cannot be written: {error}; choose another destination") from error


def put(complete: Path, destination: Path) -> None:
    """Gives a complete file its name, also across a power failure."""
    complete.replace(destination)
    folder = os.open(destination.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """The hexadecimal checksum of a file's bytes."""
    digest = hashlib.new(algorithm)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Only one process of this machine (or shared folder) at a time is in a block with this path.

    Args:
        path: what is worked on; ``.<name>.lock`` beside it is made and left there.
        waiting: called once if another process is there already.

    Raises:
        DataError: the lock cannot be made, for instance because the folder is read-only.
    """
    lock = path.with_name(f".{path.name}.lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
    except OSError as error:
        raise DataError(
            f"{path.parent} cannot be written to: {error}; choose another folder with RAYFL_DATA"
        ) from error
    # The operating system lets go of the lock when the process dies.
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
