"""Stages of a run, a number of rounds each, in which clients' data differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class NoStages(BaseModel):
    """Every client has the same samples in all rounds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["none"] = "none"

    @property
    def active(self) -> bool:
        """Returns whether data change."""
        return False

    def stage_of(self, round: int) -> int:
        """Returns the stage of a round, both from 0; see :meth:`Staged.stage_of`."""
        return 0

    def ends_after(self, rounds_completed: int) -> bool:
        """Returns whether a stage ends with a round; see :meth:`Staged.ends_after`."""
        return False


class Staged(BaseModel, ABC):
    """What all kinds have in common: stages, of a number of rounds each, the last one up to the end of the run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    count: int = Field(ge=2, description="S, how many stages there are.")
    rounds: int = Field(ge=1, description="How many rounds each stage has; the last one goes on to the end of the run.")

    @property
    def active(self) -> bool:
        """Returns whether data change."""
        return True

    def stage_of(self, round: int) -> int:
        """Returns the stage of a round.

        Args:
            round: t, 0-indexed.

        Returns:
            s, from 0 to S - 1.
        """
        return min(round // self.rounds, self.count - 1)

    def ends_after(self, rounds_completed: int) -> bool:
        """Returns whether a stage, other than the last one, ends when this many rounds are done."""
        return rounds_completed % self.rounds == 0 and 0 < rounds_completed < self.rounds * self.count

    @property
    @abstractmethod
    def retested(self) -> bool:
        """Returns whether test samples of earlier stages are scored by stage, to see what has been forgotten."""
