"""Peak memory of a process and everything it starts."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from types import TracebackType

_NAME = "RAYFL_RACE_MARK"
_PERIOD_S = 0.5


class Peak:
    """Watches all processes that carry a mark in their environment, children and daemons included.

    Attributes:
        mark: to be added to the environment of the first one.
        mib: largest sum so far, in MiB. Memory that processes share is divided among them (PSS).
    """

    def __init__(self) -> None:
        self.mark = {_NAME: uuid.uuid4().hex}
        self.mib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        mark = f"{_NAME}={self.mark[_NAME]}".encode()
        while not self._stop.wait(_PERIOD_S):
            self.mib = max(self.mib, sum(_pss(folder, mark) for folder in Path("/proc").glob("[0-9]*")) / 1024)


def _pss(folder: Path, mark: bytes) -> int:
    """KiB of one process; 0 without the mark, and where it is gone."""
    try:
        if mark not in (folder / "environ").read_bytes():
            return 0
        rows = (folder / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(row.split()[1]) for row in rows if row.startswith("Pss:")), 0)
