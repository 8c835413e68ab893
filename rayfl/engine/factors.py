"""The values of a plan's factors, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rayfl.engine.numbers import Arithmetic, Factor, Read, evaluated
from rayfl.engine.plan import Part


class Factors:
    """Knows what is drawn and frozen for a local update.

    Args:
        draws: by name, arrays with one entry a step.
        frozen: by name, numbers among other things.
    """

    def __init__(self, draws: Mapping[str, Any] | None, frozen: Mapping[str, Any] | None) -> None:
        self._sources = {"draw": draws or {}, "frozen": frozen or {}}
        self._places: dict[tuple[Factor, int | None], int] = {}
        self._values: list[float | list[float]] = []
        self._measured: list[tuple[int, Factor]] = []

    def place(self, part: Part) -> int:
        """Where among the values a part's factor is."""
        key = part.factor, part.group
        if key not in self._places:
            self._places[key] = len(self._values)
            if _is_measured(part.factor):
                self._measured.append((self._places[key], part.factor))
                self._values.append(0.0)
            else:
                self._values.append(self._ahead(*key))
        return self._places[key]

    def values(self, number: int) -> list[float]:
        """All values in a step; 0 for what is measured."""
        return [value if isinstance(value, float) else value[number] for value in self._values]

    def is_one(self, place: int) -> bool:
        """Whether a factor is 1 in all steps."""
        return self._values[place] == 1.0

    def measure(self, values: list[float], number: int, measured: Mapping[str, float]) -> None:
        """Fills in what depends on measured numbers, given by name."""

        def read(one: Read) -> float:
            if one.source == "measured":
                return measured[one.name]
            found = self._ahead(one, None)
            return found if isinstance(found, float) else found[number]

        for place, factor in self._measured:
            values[place] = float(evaluated(factor, read))

    def _ahead(self, factor: Factor, group: int | None) -> float | list[float]:
        """The value, or those of all steps."""
        read = evaluated(factor, lambda one: np.asarray(self._sources[one.source][one.name], dtype=np.float64))
        value = np.asarray(read, dtype=np.float64)
        found: float | list[float] = (value if group is None or not value.ndim else value[..., group]).tolist()
        return found


def _is_measured(factor: Factor) -> bool:
    if isinstance(factor, Arithmetic):
        return _is_measured(factor.left) or _is_measured(factor.right)
    return isinstance(factor, Read) and factor.source == "measured"
