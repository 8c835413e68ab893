"""How the images of one local update are changed at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rayfl.data.images.augmentation import Augmentation
from rayfl.data.images.views import Changes

EVALUATED = 1024
"""For how many samples an evaluation draws."""


@dataclass(frozen=True, eq=False)
class Variations:
    """How the images of one local update are changed.

    Attributes:
        augmentation: the kinds of changes.
        drawn: the random numbers; rows are the images in the order in which the update sees them.
    """

    augmentation: Changes
    drawn: Mapping[str, Tensor]

    @classmethod
    def of_steps(
        cls, augmentation: Changes, bounds: Sequence[int], repeats: int, generator: np.random.Generator
    ) -> Variations:
        """Draws for all steps of an update.

        Args:
            augmentation: the kinds of changes.
            bounds: step s sees the images ``bounds[s]`` to ``bounds[s + 1]`` (excluded).
            repeats: how many consecutive steps see one and the same mini-batch, changed alike.
            generator: the stream ``augment`` of the client, round and pass.
        """
        batches = [stop - start for start, stop in pairwise(bounds)][::repeats]
        drawn = augmentation.draw(generator, sum(batches))
        if repeats > 1:
            ends = np.cumsum([0, *batches])
            rows = [np.tile(np.arange(ends[i], ends[i + 1]), repeats) for i in range(len(batches))]
            order = torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *rows]))
            drawn = {name: values[order] for name, values in drawn.items()}
        return cls(augmentation, drawn)

    @classmethod
    def of_evaluation(cls, augmentation: Augmentation, generator: np.random.Generator) -> Variations:
        """Draws for :data:`EVALUATED` samples, for :meth:`of_samples`: the same in all evaluations of a run.

        So losses of two rounds or methods differ by their models alone.

        Args:
            augmentation: the kinds of changes.
            generator: the stream ``views``.
        """
        return cls(augmentation, augmentation.draw(generator, EVALUATED))

    def part(self, start: int, stop: int) -> Variations:
        """Returns the variations of the images ``start`` to ``stop`` (excluded)."""
        return Variations(self.augmentation, {name: values[start:stop] for name, values in self.drawn.items()})

    def to(self, device: torch.device) -> Variations:
        """Returns the variations on a device."""
        drawn = {name: values.to(device) for name, values in self.drawn.items()}
        return Variations(self.augmentation.on(device), drawn)

    def applied(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The images and their targets, one a row of the random numbers, changed."""
        return self.augmentation.both(x, y, self.drawn)

    def of_samples(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Changes images by the random numbers of the rows ``numbers``; beyond the last row the first one follows.

        Args:
            x: images of shape (b, channels, rows, columns).
            numbers: int64 of shape (b,), on the same device.
        """
        drawn = {name: values[numbers % len(values)] for name, values in self.drawn.items()}
        return self.augmentation.both(x, numbers, drawn)[0]
