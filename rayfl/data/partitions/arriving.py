"""Classes, domains or samples that arrive over the stages of a run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rayfl.data.partitions.stage import Staged
from rayfl.randomness import RandomStreams

Memory = Annotated[int, Field(ge=0)] | Literal["all"]
_MEMORY = (
    "How many of its earlier training samples a client keeps beside those of the stage, as many of each class as can "
    "be; all: each of them."
)


class Arriving(Staged):
    """Kinds in which each sample belongs to one stage, and arrives with it."""

    memory: Memory = Field(default=0, description=_MEMORY)

    @abstractmethod
    def arrivals(
        self, kinds: Sequence[np.ndarray], count: int, streams: RandomStreams, client: int
    ) -> list[np.ndarray]:
        """Returns the stage of each sample of a client.

        Args:
            kinds: of its samples, by which they arrive (classes, or domains): int64, an array for each part (training,
                validation, test).
            count: how many kinds there are; 0 where samples have none.
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


class GroupStages(Arriving):
    """Kinds of samples that arrive in groups.

    The kinds are divided into S groups, as alike in size as can be, and a client's samples of a group are there in
    its stage alone, but for those that it keeps.
    """

    order: Literal["given", "drawn", "own"]

    @property
    def retested(self) -> bool:
        """Returns whether test samples are scored by stage: they are."""
        return True

    def arrivals(
        self, kinds: Sequence[np.ndarray], count: int, streams: RandomStreams, client: int
    ) -> list[np.ndarray]:
        """See the base class; uses the stream ``stages.order``."""
        if self.order == "own":
            order = streams.generator("stages.order", client=client).permutation(np.unique(np.concatenate(kinds)))
        else:
            order = np.arange(count)
            order = streams.generator("stages.order").permutation(order) if self.order == "drawn" else order
        group = np.zeros(count, dtype=np.int64)
        for stage, members in enumerate(np.array_split(order, self.count)):
            group[members] = stage
        return [group[part] for part in kinds]


class ClassStages(GroupStages):
    """Classes that arrive in groups: class-incremental learning."""

    name: Literal["classes"] = "classes"
    order: Literal["given", "drawn", "own"] = Field(
        default="given",
        description="In which order classes arrive: given, 0, 1, 2 and so on; drawn, one random order for all clients; "
        "own, each client divides the classes that it has, in a random order of its own.",
    )


class DomainStages(GroupStages):
    """Domains that arrive in groups, with the same classes: domain-incremental learning."""

    name: Literal["domains"] = "domains"
    order: Literal["given", "drawn", "own"] = Field(
        default="given",
        description="In which order domains arrive: given, as the data set has them; drawn, one random order for all "
        "clients; own, each client divides the domains that it has samples of, in a random order of its own.",
    )


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
        self, kinds: Sequence[np.ndarray], count: int, streams: RandomStreams, client: int
    ) -> list[np.ndarray]:
        """See the base class; uses the stream ``stages.samples``."""
        train, *others = kinds
        found = np.zeros(len(train), dtype=np.int64)
        order = streams.generator("stages.samples", client=client).permutation(len(train))
        for stage, members in enumerate(np.array_split(order, self.count)):
            found[members] = stage
        return [found, *(np.zeros(len(part), dtype=np.int64) for part in others)]
