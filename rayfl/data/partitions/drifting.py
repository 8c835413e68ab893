"""Inputs or labels that drift from stage to stage of a run."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from rayfl.data.images.places import turned, within
from rayfl.data.partitions.stage import Staged
from rayfl.randomness import RandomStreams

_SHARE = "Share of the clients that go on to the next one in each later stage, drawn at random; the others stay."


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
        found: np.ndarray = meaning[y].astype(y.dtype)
        return found
