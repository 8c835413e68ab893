"""Several changed images of each sample, each by changes of its own: weak and strong ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rayfl.data.images.augmentation import Augmentation


class Changes(Protocol):
    """What changes images at random: one :class:`Augmentation`, or several views."""

    def on(self, device: torch.device) -> Changes: ...

    def draw(self, generator: np.random.Generator, count: int) -> dict[str, Tensor]: ...

    def both(self, x: Tensor, y: Tensor, drawn: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Views:
    """One or several changed images of each sample.

    Attributes:
        each: the changes of each view; None: the image as it is.
    """

    each: tuple[Augmentation | None, ...]

    def on(self, device: torch.device) -> Views:
        """Returns the views on a device."""
        return replace(self, each=tuple(None if one is None else one.on(device) for one in self.each))

    def draw(self, generator: np.random.Generator, count: int) -> dict[str, Tensor]:
        """Random numbers of ``count`` samples, view after view; rows are samples.

        Args:
            generator: the stream ``augment`` of a client, round and pass.
            count: how many samples are seen.

        Returns:
            What :meth:`Augmentation.draw` gives for each view, under ``<view>.<name>``.
        """
        drawn: dict[str, Tensor] = {}
        for view, changes in enumerate(self.each):
            if changes is not None:
                drawn |= {f"{view}.{name}": values for name, values in changes.draw(generator, count).items()}
        return drawn

    def both(self, x: Tensor, y: Tensor, drawn: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The views of each sample, and the targets as they are.

        Args:
            x: images of shape (n, channels, rows, columns).
            y: the targets, n rows.
            drawn: see :meth:`draw`.

        Returns:
            Images of shape (n, views, channels, rows, columns), and ``y``.
        """
        found = []
        for view, changes in enumerate(self.each):
            own = {name.partition(".")[2]: values for name, values in drawn.items() if name.startswith(f"{view}.")}
            found.append(x if changes is None else changes(x, own))
        return torch.stack(found, 1), y
