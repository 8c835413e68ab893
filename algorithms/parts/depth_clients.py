"""Clients that train the first stages of a network, as many as their depth allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from algorithms.base import Algorithm, setting
from algorithms.parts.capacities import drawn, in_turn
from algorithms.parts.exits import Exits, check_depths, depth_count
from rayfl.engine.round_context import RoundContext
from rayfl.tasks.base import Task

_NO_NORM = "clients of unlike depths have unlike normalization layers"


class DepthClients(Algorithm):
    """A method whose clients have depths: into how many a network is cut, and who has which."""

    personalized: ClassVar[str] = "submodel"
    no_privacy: ClassVar[str] = (
        "its clients send parts of the model, and each number is the mean over those who have it"
    )
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(("statistics", "all"), _NO_NORM)

    classifiers: int | None = setting(
        None, "D", "how many depths there are; null: 4, or as many as the network has stages if these are fewer", ge=1
    )
    depths: tuple[Annotated[int, Field(ge=1)], ...] | None = setting(
        None, "l_k", "depths that clients have, 1 to D; null: all of them", min_length=1
    )
    depth_choice: Literal["in_turn", "drawn"] = setting(
        "in_turn",
        "",
        "which of the depths a client has: in_turn, client k the one at place k, and again from the first; drawn, one "
        "draw for the run",
    )
    shares: tuple[Annotated[float, Field(ge=0)], ...] | None = setting(
        None,
        "",
        "how likely each of the depths is drawn, of any sum; null: all alike",
        only={"depth_choice": ("drawn",)},
    )

    @model_validator(mode="after")
    def _shares_fit_depths(self) -> Self:
        if self.shares is None:
            return self
        if self.depths is None:
            raise ValueError("shares: name the depths that they are of (depths)")
        if len(self.shares) != len(self.depths) or not sum(self.shares) > 0:
            raise ValueError(f"shares: give one for each of the {len(self.depths)} depths, and not all 0")
        return self

    def check(self, task: Task, context: RoundContext) -> None:
        check_depths(self.name, task, self.classifiers, self.depths)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.depths is None or self.classifiers is None or max(self.depths) == self.classifiers:
            return super().remarks(context)
        most = max(self.depths)
        untrained = f"no client is deeper than {most} of {self.classifiers} (algorithm.depths): what is deeper in the "
        return (*super().remarks(context), f"{untrained}global model stays as it is drawn, and its score has it")

    def exits(self, task: Task) -> Exits:
        """The network with its classifiers."""
        return Exits(task.network, depth_count(task, self.classifiers))

    def depth(self, client: int, context: RoundContext, count: int) -> int:
        """l_k.

        Args:
            client: k; numbers of newcomers too.
            context: of the run.
            count: D.
        """
        depths = self.those(count)
        if self.depth_choice == "in_turn":
            return in_turn(depths, client)
        return drawn(depths, "depths", client, context, self.shares)

    def those(self, count: int) -> tuple[int, ...]:
        """The depths that clients have; ``count`` is D."""
        return tuple(range(1, count + 1)) if self.depths is None else self.depths
