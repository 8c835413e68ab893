"""Contributions to a weighted mean, and whether they fit into an exact sum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from rayfl.aggregation.fixed_point import HIGH_BITS, HIGH_LIMIT
from rayfl.aggregation.limbs import Summand
from rayfl.aggregation.magnitudes import Extremes, largest
from rayfl.params import Tree, leaves, map_leaves, own_dicts

Form = tuple[tuple[int, ...], torch.dtype] | None
"""Shape and type of a tensor leaf; None marks a plain number."""

REMEDY = (
    "weighted values are summed exactly up to 2^43 (8.8e12) in all. If training diverged, lower train.lr or set "
    "train.max_grad_norm; if values and weights are meant to be so large, divide the weights by a constant that is the "
    "same for all clients"
)
"""What to do about sums that leave the fixed-point range."""


@dataclass(frozen=True)
class Weighted:
    """A client's contribution to a weighted mean.

    Attributes:
        tree: the values.
        weight: a positive number; the client's sample count, or 1 for a uniform mean. All of a mean are 2^-32 at least.
        group: the mean it belongs to, if there are several (``Clients.means``).
        size: bytes that it takes to send, if it is encoded in fewer than its tensors have; None: those of its tensors.
        within: whether the change was within the bound that it was clipped to, a norm or a magnitude of its entries; a
            scalar of bool. None where it was not clipped.
        summand: what a sum gets in the place of ``tree``, where that cannot be decoded one by one; None: ``tree``.
    """

    tree: Tree
    weight: int | float = 1
    group: str = ""
    size: int | None = None
    within: Tensor | None = None
    summand: Tree | None = None

    @property
    def added(self) -> Tree:
        """What a sum gets."""
        return self.tree if self.summand is None else self.summand


@dataclass(frozen=True, slots=True)
class Inspected:
    """A checked contribution, ready to be added.

    Attributes:
        summand: the tree and weight to add.
        weight: its exact weight.
        template: the form of each leaf.
    """

    summand: Summand
    weight: Fraction | int
    template: dict[str, Form]

    @classmethod
    def of(cls, contribution: Weighted, known: Extremes | None = None) -> Inspected:
        """Inspects a contribution; arguments and errors are those of :meth:`ExactSum.add`."""
        weight = contribution.weight
        if not _is_weight(weight):
            raise ValueError(f"weights must be positive and finite numbers, got {weight!r:.80}")
        template = _template(contribution.added)
        bound = bound_of(largest(contribution.added, known), weight)
        kept = own_dicts if None not in template.values() else with_floats
        return cls(Summand(kept(contribution.added), weight, bound), exactly(weight), template)

    def fits(self, parts: int) -> bool:
        """Returns whether the sum of n contributions of such magnitudes stays in the fixed-point range."""
        return self.summand.bound * parts < HIGH_LIMIT


def _is_weight(weight: Any) -> bool:
    try:
        return bool(weight > 0 and math.isfinite(weight))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # None, a text, too long a number, several numbers
        return False


def exactly(weight: Any) -> Fraction | int:
    """Returns the weight as an exact number."""
    return int(weight) if isinstance(weight, Integral) else Fraction(float(weight))


def bound_of(largest: float, weight: Any) -> int:
    """Returns what the high limb of a contribution, with a later carry, does not exceed; capped at the limit."""
    scaled = largest * float(weight) * 2.0**HIGH_BITS
    return int(scaled) + 2 if scaled < HIGH_LIMIT else HIGH_LIMIT


def too_large(contribution: Weighted) -> str:
    """Returns a message: what in a contribution exceeds the range of a sum, and the fix."""
    most, path = max((largest({"": leaf}), path) for path, leaf in leaves(contribution.added))
    return f"{path!r} holds up to {most:.3g} and has the weight {contribution.weight:.6g}: {REMEDY}"


def _template(tree: Mapping[str, Any]) -> dict[str, Form]:
    """The form of each leaf."""
    template: dict[str, Form] = {}
    for path, leaf in leaves(tree):
        if not isinstance(leaf, Tensor):
            template[path] = None
            continue
        if not leaf.is_floating_point():
            raise TypeError(f"only floating-point tensors can be averaged, {path!r} is {leaf.dtype}")
        template[path] = (tuple(leaf.shape), leaf.dtype)
    return template


def with_floats(tree: Mapping[str, Any]) -> Tree:
    """Returns the tree with plain numbers as floats, as they are after averaging."""
    return map_leaves(lambda leaf: leaf if isinstance(leaf, Tensor) else float(leaf), tree)
