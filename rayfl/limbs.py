"""Sums of weighted trees in fixed point: integers, so that neither order nor grouping matters.

A product ``weight * value`` is formed in float64 (exact for float32 values and sample counts below 2^29),
then split into two integers in units of 2^-20 and 2^-72.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfl.params import leaves

HIGH_BITS = 20
_LOW_BITS = 72
_CARRY_BITS = _LOW_BITS - HIGH_BITS
# |low| <= 2^51 per contribution: after this many the carry moves up, long before an int64 can overflow.
CARRY_EVERY = 1024
HIGH_LIMIT = 2**63
# Elements worked on at a time, so that the intermediate float64 values stay in the cache.
_CHUNK = 32768
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass
class Limbs:
    """A sum of vectors as two integers an element, and what all summands have in common.

    Attributes:
        high: the sum in units of 2^-20.
        low: the rest of the sum, in units of 2^-72.
        common: the value all summands have in common, NaN where they differ; float32, or float64 where needed.
            None once they have nothing in common, as is usual after training.
    """

    high: Tensor
    low: Tensor
    common: Tensor | None

    @classmethod
    def of(cls, tree: Mapping[str, Any], weight: float) -> Limbs:
        """The sum of a single summand."""
        parts = [_vector(leaf) for _, leaf in sorted_leaves(tree)]
        kind = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
        device = next((part.device for part in parts if part.device.type != "cpu"), torch.device("cpu"))
        common = torch.cat([torch.zeros(0, dtype=kind, device=device), *(part.to(device, kind) for part in parts)])
        limbs = cls(torch.zeros_like(common, dtype=torch.int64), torch.zeros_like(common, dtype=torch.int64), common)
        limbs.add(tree, weight)
        return limbs

    def add(self, tree: Mapping[str, Any], weight: float) -> None:
        """Adds a tree of the same structure; its magnitudes must be within the range of ``high``."""
        device = self.high.device
        # Accelerators lose more to the launches than they win by the cache.
        chunk = _CHUNK if device.type == "cpu" else max(1, len(self.high))
        scale = float(weight) * 2.0**HIGH_BITS
        product = torch.empty(min(chunk, len(self.high)), dtype=torch.float64, device=device)
        rounded, integers = torch.empty_like(product), torch.empty_like(product, dtype=torch.int64)
        start, alike = 0, False
        for _, leaf in sorted_leaves(tree):
            for values in torch.split(_vector(leaf).to(device), chunk):
                size = len(values)
                here = slice(start, start + size)
                fine, coarse, limb = product[:size], rounded[:size], integers[:size]
                torch.round(fine.copy_(values).mul_(scale), out=coarse)
                self.high[here].add_(limb.copy_(coarse))
                fine.sub_(coarse).mul_(2.0**_CARRY_BITS).round_()
                self.low[here].add_(limb.copy_(fine))
                if self.common is not None:
                    alike |= _keep_common(self.common[here], values)
                start += size
        if not alike:
            self.common = None

    def merge(self, other: Limbs) -> None:
        """Adds another sum."""
        device = self.high.device
        self.high.add_(other.high.to(device))
        self.low.add_(other.low.to(device))
        if self.common is None or other.common is None or not _keep_common(self.common, other.common.to(device)):
            self.common = None

    def carry(self) -> None:
        """Moves what exceeds half a unit of ``high`` out of ``low``; the limbs of a sum are then unique."""
        excess = (self.low + (1 << (_CARRY_BITS - 1))) >> _CARRY_BITS
        self.high.add_(excess)
        self.low.sub_(excess << _CARRY_BITS)

    def mean(self, weight: float) -> Tensor:
        """The sum over ``weight`` in float64; the common value where there is one."""
        self.carry()
        total = self.high.double().mul_(2.0**-HIGH_BITS).add_(self.low.double().mul_(2.0**-_LOW_BITS))
        mean = total.div_(weight)
        return mean if self.common is None else torch.where(self.common.isnan(), mean, self.common.double())


def _keep_common(common: Tensor, values: Tensor) -> bool:
    """Puts NaN where ``values`` are not, bit by bit, what is common so far; whether anything may still be."""
    bits = _BITS[common.dtype]
    same = common.view(bits) == values.to(common.dtype).view(bits)
    torch.where(same, common, common.new_full((), math.nan), out=common)
    return bool(same.any())


def sorted_leaves(tree: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Leaves in the order in which they lie in the limbs."""
    return sorted(leaves(tree), key=lambda pair: pair[0])


def _vector(leaf: Any) -> Tensor:
    """A leaf as a vector of float32 (float64 if it is that, or a number)."""
    if not isinstance(leaf, Tensor):
        return torch.tensor([leaf], dtype=torch.float64)
    flat = leaf.detach().reshape(-1)
    return flat if flat.dtype in _BITS else flat.float()
