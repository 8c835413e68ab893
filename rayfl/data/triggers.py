"""What marks the samples of a backdoor: pixels in a corner, tokens at the end of a text, columns of a table.

Sources: Gu et al., 2017 (BadNets: pixels in a corner); Xie et al., ICLR 2020 (DBA: a trigger in parts).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rayfl.examples import lengths_of

WHOLE = slice(None)
"""All elements of a trigger."""


class Trigger(ABC):
    """Elements (pixels, tokens or columns) with fixed values, in a fixed order."""

    @property
    @abstractmethod
    def elements(self) -> int:
        """Returns how many elements there are."""

    @abstractmethod
    def put(self, x: Tensor, which: slice = WHOLE) -> Tensor:
        """Returns new inputs, of the same shape, that carry the trigger.

        Args:
            x: inputs as models see them, shape (n, *input shape).
            which: the elements they carry.
        """

    def part(self, number: int, parts: int) -> slice:
        """Returns the elements of one of several consecutive parts, whose sizes differ by at most one."""
        return slice(self.elements * number // parts, self.elements * (number + 1) // parts)


@dataclass(frozen=True, eq=False)
class Patch(Trigger):
    """A square (of volumes a cube) in the last corner: at the right of the lowest rows. Elements go row by row.

    Attributes:
        size: of each side, in pixels of what a model sees.
        values: what the model sees there, by channel, float32 of shape (C,).
        sides: how many sides an image has: 2, a volume 3.
    """

    size: int
    values: np.ndarray
    sides: int = 2

    @property
    def elements(self) -> int:
        """Returns the number of pixels."""
        return int(self.size**self.sides)

    def put(self, x: Tensor, which: slice = WHOLE) -> Tensor:
        """See the base class; x is of shape (n, C, height, width), or (n, C, height, width, depth)."""
        chosen = torch.zeros(self.elements, dtype=torch.bool)
        chosen[which] = True
        mask = torch.zeros(x.shape[2:], dtype=torch.bool)
        mask[(slice(-self.size, None),) * self.sides] = chosen.view([self.size] * self.sides)
        values = torch.as_tensor(self.values).view(-1, *[1] * self.sides)
        return torch.where(mask.to(x.device), values.to(x), x)


@dataclass(frozen=True)
class Phrase(Trigger):
    """Tokens behind the last one of a text; where the row has no room for them they replace its last ones.

    Attributes:
        tokens: in their order.
        padding: the token that fills rows up, on the right; None where nothing does.
    """

    tokens: Sequence[int]
    padding: int | None = None

    @property
    def elements(self) -> int:
        """Returns the number of tokens."""
        return len(self.tokens)

    def put(self, x: Tensor, which: slice = WHOLE) -> Tensor:
        """See the base class; x is of shape (n, T)."""
        added = torch.tensor(self.tokens[which], dtype=x.dtype, device=x.device)
        first = lengths_of(x, self.padding).clamp(max=x.shape[1] - len(added))
        places = first[:, None] + torch.arange(len(added), device=x.device)
        return x.scatter(1, places, added.expand(len(x), -1))


class Columns(Trigger):
    """Columns of a row of numbers that have fixed values, in ascending order.

    Args:
        values: by column, what a model sees.
    """

    def __init__(self, values: Mapping[int, float]) -> None:
        self._columns = sorted(values)
        self._values = [values[column] for column in self._columns]

    @property
    def elements(self) -> int:
        """Returns the number of columns."""
        return len(self._columns)

    def put(self, x: Tensor, which: slice = WHOLE) -> Tensor:
        """See the base class; x is of shape (n, D)."""
        mask, values = torch.zeros(x.shape[1], dtype=torch.bool), torch.zeros(x.shape[1], dtype=torch.float64)
        mask[self._columns[which]] = True
        values[self._columns[which]] = torch.tensor(self._values[which], dtype=values.dtype)
        return torch.where(mask.to(x.device), values.to(x), x)
