"""Times the phases of a round."""

from __future__ import annotations

import time
from collections.abc import Mapping


class Stopwatch:
    """Seconds by phase, from the moment it is made.

    Attributes:
        laps: seconds by name of the phase.
    """

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, phase: str, less: Mapping[str, float] | None = None) -> None:
        """Ends a phase.

        Args:
            phase: its name.
            less: parts of the time since the last lap that belong to other phases.
        """
        now = time.perf_counter()
        parts = dict(less or {})
        parts[phase] = now - self._last - sum(parts.values())
        for name, seconds in parts.items():
            self.laps[name] = self.laps.get(name, 0.0) + seconds
        self._last = now

    @property
    def total(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._start
