"""Data that change from round to round: classes or samples that arrive, inputs or labels that drift.

Each configuration is also the rule by which a client's samples belong to stages, a number of rounds each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rayfl.data.images.places import turned, within
from rayfl.randomness import RandomStreams

Memory = Annotated[int, Field(ge=0)] | Literal["all"]
_MEMORY = (
    "How many of its earlier training samples a client keeps beside those of the stage, as many of each class as can "
    "be; all: each of them."
)
_SHARE = "Share of the clients that go on to the next one in each later stage, drawn at random; the others stay."


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


class Arriving(Staged):
    """Kinds in which each sample belongs to one stage, and arrives with it."""

    memory: Memory = Field(default=0, description=_MEMORY)

    @abstractmethod
    def arrivals(
        self, labels: Sequence[np.ndarray], classes: int, streams: RandomStreams, client: int
    ) -> list[np.ndarray]:
        """Returns the stage of each sample of a client.

        Args:
            labels: of its samples, int64, an array for each part (training, validation, test).
            classes: C; 0 where samples have no class.
            streams: the experiment's randomness.
            client: its number.

        Returns:
            Arrays like those of the labels, int64 from 0 to S - 1.
        """

    def trained_on(
        self, arrivals: np.ndarray, labels: np.ndarray, stage: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Returns which training samples a client has in a stage: those of the stage, and those that it keeps.

        What it keeps of a number M of samples goes by turns to the classes that it has seen, in an order that is drawn
        once: with each stage, the last ones of a class make room, and none that was given up comes back
        (Rebuffi et al., iCaRL, CVPR 2017, with random samples in place of chosen ones).

        Args:
            arrivals: of its training samples.
            labels: theirs.
            stage: s.
            generator: at the beginning of a stream of the client.

        Returns:
            Places, ascending int64.
        """
        new, earlier = np.flatnonzero(arrivals == stage), np.flatnonzero(arrivals < stage)
        if self.memory == "all":
            return np.sort(np.concatenate([new, earlier]))
        order = np.argsort(generator.permutation(len(labels)))
        earlier = earlier[np.argsort(order[earlier], kind="stable")]
        turn = np.empty(len(earlier), dtype=np.int64)
        for label in np.unique(labels[earlier]):
            own = labels[earlier] == label
            turn[own] = np.arange(own.sum())
        kept = earlier[np.lexsort((labels[earlier], turn))][: self.memory]
        return np.sort(np.concatenate([new, kept]))


class ClassStages(Arriving):
    """Classes that arrive in groups: class-incremental learning.

    The classes are divided into S groups, as alike in size as can be, and a client's samples of a group are there in
    its stage alone, but for those that it keeps.
    """

    name: Literal["classes"] = "classes"
    order: Literal["given", "drawn", "own"] = Field(
        default="given",
        description="In which order classes arrive: given, 0, 1, 2 and so on; drawn, one random order for all clients; "
        "own, each client divides the classes that it has, in a random order of its own.",
    )

    @property
    def retested(self) -> bool:
        """Returns whether test samples are scored by stage: they are."""
        return True

    def arrivals(
        self, labels: Sequence[np.ndarray], classes: int, streams: RandomStreams, client: int
    ) -> list[np.ndarray]:
        """See the base class; uses the stream ``stages.order``."""
        if self.order == "own":
            order = streams.generator("stages.order", client=client).permutation(np.unique(np.concatenate(labels)))
        else:
            order = np.arange(classes)
            order = streams.generator("stages.order").permutation(order) if self.order == "drawn" else order
        group = np.zeros(classes, dtype=np.int64)
        for stage, members in enumerate(np.array_split(order, self.count)):
            group[members] = stage
        return [group[part] for part in labels]


class SampleStages(Arriving):
    """Training samples that arrive over time: each client's, in a random order, divided into S equal parts.

    Validation and test samples are there from the beginning.
    """

    name: Literal["samples"] = "samples"
    memory: Memory = Field(default="all", description=_MEMORY)

    @property
    def retested(self) -> bool:
        """Returns whether test samples are scored by stage: they belong to none."""
        return False

    def arrivals(
        self, labels: Sequence[np.ndarray], classes: int, streams: RandomStreams, client: int
    ) -> list[np.ndarray]:
        """See the base class; uses the stream ``stages.samples``."""
        train, *others = labels
        found = np.zeros(len(train), dtype=np.int64)
        order = streams.generator("stages.samples", client=client).permutation(len(train))
        for stage, members in enumerate(np.array_split(order, self.count)):
            found[members] = stage
        return [found, *(np.zeros(len(part), dtype=np.int64) for part in others)]


class Drifting(Staged):
    """Kinds in which all samples are there in all stages, and change from one to the next.

    What a client's samples are in a stage is its *concept*, 0 in the first stage.
    """

    share: float = Field(default=1.0, gt=0, le=1, description=_SHARE)

    def concepts(self, clients: int, streams: RandomStreams) -> np.ndarray:
        """Returns the concept of each client in each stage, int64 of shape (clients, S), ascending from 0.

        Args:
            clients: how many there are.
            streams: the experiment's randomness; uses the stream ``stages.concept``, in which rounds are stages.
        """
        moves = np.zeros((clients, self.count), dtype=np.int64)
        for stage in range(1, self.count):
            moves[:, stage] = streams.generator("stages.concept", stage).random(clients) < self.share
        return moves.cumsum(1)

    @abstractmethod
    def changed_inputs(self, x: torch.Tensor, concept: int, black: torch.Tensor) -> torch.Tensor:
        """Returns what samples are under a concept.

        Args:
            x: inputs, shape (n, *input shape).
            concept: its number.
            black: what stands for black in each channel.
        """

    @abstractmethod
    def changed_labels(self, y: np.ndarray, concept: int, classes: int) -> np.ndarray:
        """Returns the classes of samples under a concept.

        Args:
            y: their classes, int64 of shape (n,).
            concept: its number.
            classes: C.
        """


class RotationStages(Drifting):
    """Images that turn from stage to stage, about their middle, to the nearest pixel; corners become black.

    So the distribution of the inputs drifts, and that of labels given inputs only as far as classes look alike.
    """

    name: Literal["rotation"] = "rotation"
    degrees: float = Field(default=30.0, gt=0, lt=360, description="By how much one concept is turned from the last.")

    @property
    def retested(self) -> bool:
        """Returns whether test samples are scored by stage: as they were turned then."""
        return True

    def changed_inputs(self, x: torch.Tensor, concept: int, black: torch.Tensor) -> torch.Tensor:
        """See the base class; images of shape (n, channels, rows, columns)."""
        angle = np.deg2rad(concept * self.degrees)
        if not concept or not len(x):
            return x
        height, width = x.shape[-2:]
        turn = torch.tensor([[np.cos(angle), np.sin(angle)]], dtype=torch.float64)
        places = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        row, column = turned(places[0][None], places[1][None], turn, height, width)
        inside = within(row, column, height, width)[0]
        found = x[..., row[0].clamp(0, height - 1), column[0].clamp(0, width - 1)]
        return torch.where(inside, found, black.to(x)[:, None, None])

    def changed_labels(self, y: np.ndarray, concept: int, classes: int) -> np.ndarray:
        """See the base class; they stay."""
        return y


class LabelStages(Drifting):
    """Labels that change their meaning: concept drift, with the same inputs.

    Concept 1 exchanges classes 0 and 1, concept 2 classes 2 and 3, and so on, each from the labels of the source; after
    the last pair comes the first one again (as in Jothimurugesan et al., FedDrift, AISTATS 2023).
    """

    name: Literal["labels"] = "labels"

    @property
    def retested(self) -> bool:
        """Returns whether test samples are scored by stage: an earlier concept is no longer right."""
        return False

    def changed_inputs(self, x: torch.Tensor, concept: int, black: torch.Tensor) -> torch.Tensor:
        """See the base class; they stay."""
        return x

    def changed_labels(self, y: np.ndarray, concept: int, classes: int) -> np.ndarray:
        """See the base class."""
        if not concept:
            return y
        first = 2 * ((concept - 1) % (classes // 2))
        meaning = np.arange(classes)
        meaning[[first, first + 1]] = first + 1, first
        return meaning[y].astype(y.dtype)


Stages = Annotated[
    NoStages | ClassStages | SampleStages | RotationStages | LabelStages,
    Field(discriminator="name"),
]


def recorded_stages(content: Mapping[str, Any]) -> Staged | NoStages:
    """Returns the section of a run, given the content of its ``config.yaml``; runs from before had none."""
    found: Staged | NoStages = TypeAdapter(Stages).validate_python(content.get("stages", {"name": "none"}))
    return found
