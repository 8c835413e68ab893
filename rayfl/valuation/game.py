"""A round as a cooperative game: what each coalition of its clients is worth, found once and counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Found = Literal["exact", "drawn", "skipped", "undefined"]
"""How values were found: by all coalitions that the definition has; by drawn permutations; not, because the round has
changed the utility too little (``between``), with zeros in place; not, because a utility was not a finite number."""


class UndefinedUtilityError(Exception):
    """A coalition is worth something that is no finite number."""


class Utility:
    """What coalitions are worth. Each is measured once.

    Args:
        measure: returns what a coalition is worth, given its players, ascending; the empty one is the model before the
            round.
        players: n.
    """

    def __init__(self, measure: Callable[[tuple[int, ...]], float], players: int) -> None:
        self._measure, self.players = measure, players
        self._known: dict[int, float] = {}

    @property
    def evaluations(self) -> int:
        """Returns how many coalitions were measured."""
        return len(self._known)

    @property
    def everybody(self) -> int:
        """Returns the coalition of all players."""
        return (1 << self.players) - 1

    def of(self, coalition: int) -> float:
        """Returns what a coalition is worth.

        Args:
            coalition: its players as bits.

        Raises:
            UndefinedUtilityError: it is not a finite number.
        """
        if coalition not in self._known:
            members = tuple(player for player in range(self.players) if coalition >> player & 1)
            self._known[coalition] = self._measure(members)
        if not math.isfinite(found := self._known[coalition]):
            raise UndefinedUtilityError
        return found


@dataclass(frozen=True)
class Valued:
    """The values of a round's clients.

    Attributes:
        values: float64 of shape (n,); nan where a utility was undefined.
        found: how.
        before: utility of the model before the round; nan where nothing was measured.
        after: utility of the model after it; nan likewise.
        evaluations: of models.
        permutations: that were drawn.
        truncated: places of these at which no model was evaluated, and a client was taken to add nothing.
    """

    values: np.ndarray
    found: Found = "exact"
    before: float = math.nan
    after: float = math.nan
    evaluations: int = 0
    permutations: int = 0
    truncated: int = 0
