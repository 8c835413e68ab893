"""Stops a process, or fails it, at the n-th boundary of a system call that writes to a run's folder.

Only the calls in ``rayfl.storage.local_files`` are wrapped, and only in a process that asks for it.
"""

from __future__ import annotations

import builtins
import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from rayfl.storage import files
from rayfl.storage import local_files as storage
from rayfl.storage.files import Storage

_OPEN, _FSYNC, _REPLACE, _LINK, _DELETE = builtins.open, os.fsync, os.replace, os.link, Storage.delete


class Boundaries:
    """Counts boundaries: before, within and after every write, before and after every other call.

    Args:
        at: called with the number of the boundary (from 0) and its name.
    """

    def __init__(self, at: Callable[[int, str], None]) -> None:
        self._at = at
        self._lock = threading.RLock()
        self.names: list[str] = []

    def reach(self, name: str) -> None:
        """Notes one boundary."""
        with self._lock:
            number = len(self.names)
            self.names.append(name)
            self._at(number, name)

    def install(self) -> None:
        """Wraps the calls, for the rest of this process's life."""
        storage.open = self._open  # type: ignore[attr-defined]
        storage.os = _Calls(self)  # type: ignore[attr-defined]
        Storage.delete = self._delete  # type: ignore[method-assign, assignment]

    def around(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """A call between two boundaries."""
        self.reach(f"before {name}")
        result = call(*arguments)
        self.reach(f"after {name}")
        return result

    @property
    def _delete(self) -> Callable[[Storage, str], None]:
        def delete(itself: Storage, path: str) -> None:
            with files._as_run_error("delete", path):
                self.around("delete", _DELETE, itself, path)

        return delete

    def _open(self, *arguments: Any, **options: Any) -> _File:
        return _File(self.around("open", lambda: _OPEN(*arguments, **options)), self)


class _Calls:
    """The module ``os`` with boundaries."""

    def __init__(self, boundaries: Boundaries) -> None:
        self.fsync = lambda file: boundaries.around("fsync", _FSYNC, file)
        self.replace = lambda old, new: boundaries.around("rename", _REPLACE, old, new)
        self.link = lambda old, new: boundaries.around("link", _LINK, old, new)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class _File:
    """A file whose writes have a boundary in the middle."""

    def __init__(self, file: Any, boundaries: Boundaries) -> None:
        self._file = file
        self._boundaries = boundaries

    def write(self, data: bytes) -> None:
        self._boundaries.reach("before write")
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._boundaries.reach("within write")
        self._file.write(data[len(data) // 2 :])
        self._file.flush()
        self._boundaries.reach("after write")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def count() -> Boundaries:
    """Only counts."""
    return Boundaries(lambda number, name: None)


def kill_at(target: int) -> Boundaries:
    """Ends the process, as ``kill -9`` does, at one boundary."""

    def at(number: int, name: str) -> None:
        if number == target:
            os.kill(os.getpid(), signal.SIGKILL)

    return Boundaries(at)


def fail_from(target: int, code: int, once: bool) -> Boundaries:
    """Fails calls with an error of the system (``errno.ENOSPC``, ...), one of them or all from there on.

    What is only noticed after it has been done (``after ...``) fails too: an answer of a network disk may be lost.
    """

    def at(number: int, name: str) -> None:
        if number == target or (number > target and not once and not name.startswith("after")):
            raise OSError(code, os.strerror(code))

    return Boundaries(at)
