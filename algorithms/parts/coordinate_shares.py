"""Which coordinates of a model each client of a cohort sends, where a number of them sends each one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rayfl.params import Tree


class Share:
    """The coordinates of the client at one place of a cohort (Condat et al. 2023, the sampling pattern).

    Coordinate i of d is of the places (s i + j) mod c for j = 0, ..., s - 1, so that s places have each, and all have
    as many up to one. Coordinates are counted over tensors in the order of their names as given.

    Args:
        place: from 0 to c - 1.
        cohort: c, how many places there are.
        senders: s, from 1 to c.
        names: of the tensors that are shared out.
    """

    def __init__(self, place: int, cohort: int, senders: int, names: Sequence[str]) -> None:
        self._names = tuple(names)
        period = cohort // math.gcd(senders, cohort)
        self._pattern = (place - senders * np.arange(period)) % cohort < senders

    def mask(self, tree: Mapping[str, Tensor]) -> Tree:
        """Returns which elements are the client's, by name, bool of the tensors' shapes and devices."""
        first, found = 0, dict[str, Tensor]()
        pattern = torch.from_numpy(self._pattern)
        for name in self._names:
            leaf = tree[name]
            numbers = torch.arange(first, first + leaf.numel(), device=leaf.device) % len(pattern)
            found[name] = pattern.to(leaf.device)[numbers].view(leaf.shape)
            first += leaf.numel()
        return {**found}

    def num_bytes(self, tree: Mapping[str, Tensor]) -> int:
        """Returns how many bytes the client's elements have."""
        first, total = 0, 0
        for name in self._names:
            leaf = tree[name]
            total += (self._before(first + leaf.numel()) - self._before(first)) * leaf.element_size()
            first += leaf.numel()
        return total

    def _before(self, end: int) -> int:
        """How many coordinates before one are the client's."""
        whole, rest = divmod(end, len(self._pattern))
        return whole * int(self._pattern.sum()) + int(self._pattern[:rest].sum())
