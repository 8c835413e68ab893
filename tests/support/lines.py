"""Counts the lines of this project that Python executes: what the host does, whatever else the machine is doing."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

ROOT = str(Path(__file__).parents[2])
_FOLDERS = tuple(f"{ROOT}/{name}/" for name in ("actors", "algorithms", "rayfl"))


class Lines:
    """Counts, in its body, in the thread that enters it.

    Attributes:
        by_place: how often each line was executed, by file and number.
    """

    def __init__(self) -> None:
        self.by_place: Counter[tuple[str, int]] = Counter()

    @property
    def total(self) -> int:
        """All lines executed."""
        return sum(self.by_place.values())

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._stepped if frame.f_code.co_filename.startswith(_FOLDERS) else None

    def _stepped(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.by_place[frame.f_code.co_filename, frame.f_lineno] += 1
        return self._stepped
