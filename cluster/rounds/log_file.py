"""Writes the log of a run into its folder."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import MemoryHandler
from pathlib import Path

from rayfl.storage.files import Storage
from rayfl.storage.local_files import open_to_append
from rayfl.tracking.terminal import VisibleFormatter

_log = logging.getLogger("rayfl")


class _LogFile(logging.FileHandler):
    """A log file whose failing writes, as on a full disk, are reported once and do not end the run."""

    _said = False

    def _open(self) -> TextIOWrapper:
        return open_to_append(Path(self.baseFilename))

    def handleError(self, record: logging.LogRecord) -> None:
        """Reports the first failure to the other handlers."""
        if not self._said:
            self._said = True
            _log.warning("%s lacks lines from here on (%s); the run goes on", self.baseFilename, sys.exception())

    def close(self) -> None:
        """Closes the file; lines that cannot be written any more are lost."""
        with suppress(OSError):
            super().close()


@contextmanager
def warnings_shown() -> Iterator[None]:
    """Shows warnings on standard error in a program that does not configure logging.

    Python does so by itself only where there is no handler, and a run's log file is one.
    """
    if _log.hasHandlers():
        yield
        return
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(VisibleFormatter("%(levelname)s: %(message)s"))
    _log.addHandler(handler)
    try:
        yield
    finally:
        _log.removeHandler(handler)


@contextmanager
def buffered_log() -> Iterator[MemoryHandler]:
    """Buffers log lines until the run's folder is checked and its log file can be opened."""
    handler = MemoryHandler(capacity=sys.maxsize)
    _log.addHandler(handler)
    try:
        yield handler
    finally:
        _log.removeHandler(handler)
        handler.close()


@contextmanager
def log_file(storage: Storage, early: MemoryHandler) -> Iterator[None]:
    """Copies rayfl's log lines to ``rayfl.log`` in the run's folder, if that is on a disk.

    Args:
        storage: the run's folder.
        early: handler with buffered lines, which become the first lines of the file. It buffers no more.
    """
    _log.removeHandler(early)
    folder = storage.local_path
    if folder is None:
        yield
        return
    try:
        handler = _LogFile(folder / "rayfl.log", encoding="utf-8")
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        _log.warning("cannot write %s: %s; this run has no log", folder / "rayfl.log", why)
        yield
        return
    handler.setFormatter(VisibleFormatter("%(asctime)s %(levelname)s %(message)s"))
    handler.setLevel(logging.INFO)
    early.setTarget(handler)
    early.flush()
    level = _log.level
    _log.setLevel(logging.INFO)
    _log.addHandler(handler)
    try:
        yield
    except Exception:
        _log.info("the run ended with an error", exc_info=True)
        raise
    finally:
        _log.removeHandler(handler)
        _log.setLevel(level)
        handler.close()
