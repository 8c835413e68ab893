"""Learning rates by round."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator


class _Schedule(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    warmup: int = Field(
        0, ge=0, description="first rounds, in which the rate rises evenly to train.lr; the schedule begins after them"
    )

    def relative(self, round: int, rounds: int, lr: float = 1.0) -> float:
        """eta_t / eta.

        Args:
            round: t, 0-indexed.
            rounds: T.
            lr: eta, the rate of the training section.
        """
        if round < self.warmup:
            return (round + 1) / self.warmup
        return self._after_warmup(round - self.warmup, max(rounds - self.warmup, 1), lr)

    def stretched(self, before: int, rounds: int) -> Self:
        """Returns the schedule stretched to another number of rounds.

        Args:
            before: T for which the schedule was made.
            rounds: T of the new one.
        """
        return self.model_copy(update={"warmup": self.warmup * rounds // before, **self._changes(before, rounds)})

    def _changes(self, before: int, rounds: int) -> dict[str, Any]:
        return {}

    @abstractmethod
    def _after_warmup(self, round: int, rounds: int, lr: float) -> float: ...


class Constant(_Schedule):
    """eta in all rounds."""

    name: Literal["constant"] = "constant"

    def _after_warmup(self, round: int, rounds: int, lr: float) -> float:
        return 1.0


class Exponential(_Schedule):
    """eta factor^t."""

    name: Literal["exponential"] = "exponential"
    factor: float = Field(gt=0, le=1, description="factor on the rate per round")

    def _after_warmup(self, round: int, rounds: int, lr: float) -> float:
        return self.factor**round

    def _changes(self, before: int, rounds: int) -> dict[str, Any]:
        return {"factor": self.factor ** (before / rounds)}


class Cosine(_Schedule):
    """eta_min + (eta - eta_min) (1 + cos(pi t / T)) / 2."""

    name: Literal["cosine"] = "cosine"
    minimum: float = Field(0.0, ge=0, description="eta_min, the rate that round T would have")

    def _after_warmup(self, round: int, rounds: int, lr: float) -> float:
        least = self.minimum / lr if lr else 0.0
        return least + (1 - least) * (1 + math.cos(math.pi * round / rounds)) / 2


class Linear(_Schedule):
    """eta (1 - t / T)."""

    name: Literal["linear"] = "linear"

    def _after_warmup(self, round: int, rounds: int, lr: float) -> float:
        return 1 - round / rounds


class Step(_Schedule):
    """eta factor^floor(t / every)."""

    name: Literal["step"] = "step"
    every: int = Field(ge=1, description="rounds between two changes")
    factor: float = Field(0.1, gt=0, le=1, description="factor on the rate at each of them")

    def _after_warmup(self, round: int, rounds: int, lr: float) -> float:
        return self.factor ** (round // self.every)

    def _changes(self, before: int, rounds: int) -> dict[str, Any]:
        return {"every": max(1, self.every * rounds // before)}


class MultiStep(_Schedule):
    """eta factor^(number of milestones that are at most t)."""

    name: Literal["multistep"] = "multistep"
    milestones: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        min_length=1, description="rounds, ascending; one may be repeated"
    )
    factor: float = Field(0.1, gt=0, le=1, description="factor on the rate at each of them")

    @field_validator("milestones")
    @classmethod
    def _ascending(cls, milestones: tuple[int, ...]) -> tuple[int, ...]:
        if list(milestones) != sorted(milestones):
            raise ValueError("milestones must ascend")
        return milestones

    def _after_warmup(self, round: int, rounds: int, lr: float) -> float:
        return self.factor ** sum(milestone <= round for milestone in self.milestones)

    def _changes(self, before: int, rounds: int) -> dict[str, Any]:
        return {"milestones": tuple(max(1, milestone * rounds // before) for milestone in self.milestones)}


Schedule = Annotated[
    Constant | Exponential | Cosine | Linear | Step | MultiStep,
    Field(discriminator="name"),
]
"""Any of them, told apart by their names."""
