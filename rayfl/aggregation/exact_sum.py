"""Exact aggregation: sums that do not depend on who adds up what, and in which order.

Weighted values are summed as integers (see :mod:`rayfl.aggregation.limbs`). Integer sums are associative, so any number
of actors, any tree and any order of arrival give the same bits. One division at the end gives the mean. Where all
contributions agree to the bit the mean is that value, whatever its type and magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from rayfl.aggregation.fixed_point import CARRY_EVERY, CPU, HIGH_BITS, HIGH_LIMIT
from rayfl.aggregation.limbs import Limbs, Summand, mean_of
from rayfl.params import Tree, from_leaves, from_numpy, leaves, map_leaves, num_bytes, to_numpy

Form = tuple[tuple[int, ...], torch.dtype] | None
"""Shape and type of a tensor leaf; None marks a plain number."""


_WAITING_BYTES, _WAITING = 64 << 20, 16
"""More is not kept waiting, but for the newest contribution: by then their memory is better used for the next ones."""
_RECEIVED = 8
"""More sums of other processes are not kept apart."""


REMEDY = (
    "weighted values are summed exactly up to 2^43 (8.8e12) in all. If training diverged, lower train.lr or set "
    "train.max_grad_norm; if values and weights are meant to be so large, divide the weights by a constant that is the "
    "same for all clients"
)
"""What to do about sums that leave the fixed-point range."""


class NonFiniteError(ValueError):
    """A tree holds NaN or infinity; ``path`` names the leaf."""

    def __init__(self, path: str) -> None:
        super().__init__(f"non-finite values in {path!r}")
        self.path = path


@dataclass(frozen=True)
class Weighted:
    """A client's contribution to a weighted mean.

    Attributes:
        tree: the values.
        weight: a positive number; the client's sample count, or 1 for a uniform mean.
        group: which mean it belongs to, where there are several (``Clients.means``).
    """

    tree: Tree
    weight: int | float = 1
    group: str = ""


Extremes = Mapping[int, tuple[float, float]]
"""The least and the greatest entry of tensors, by ``id``."""


def extremes_of(trees: Sequence[Mapping[str, Any]]) -> Extremes:
    """Those of all tensors on accelerators, which are waited for once."""
    there = [leaf.detach() for tree in trees for _, leaf in leaves(tree) if _is_there(leaf)]
    names = [id(leaf) for tree in trees for _, leaf in leaves(tree) if _is_there(leaf)]
    if not there:
        return {}
    numbers = _numbers([bound for leaf in there for bound in leaf.aminmax()])
    return dict(zip(names, zip(numbers[::2], numbers[1::2], strict=True), strict=True))


def _is_there(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type != "cpu" and leaf.is_floating_point() and leaf.numel() > 0


def check_finite(tree: Mapping[str, Any], known: Extremes | None = None) -> None:
    """Raises NonFiniteError for the first leaf with NaN or infinity; ``known`` spares to look at leaves."""
    _largest(tree, known)


@dataclass
class ExactSum:
    """A running weighted sum of trees of one structure.

    ``add`` takes a contribution, ``merge`` another partial sum, ``mean`` divides. A sum of a single
    contribution keeps it as it is, which is also all that travels then. Plain numbers are averaged as floats;
    tensors must be of a floating type, since the mean of integers is none. A method that raises leaves the sum
    as it was.

    Attributes:
        count: contributions so far.
        weight: their exact total weight.
        waiting: contributions that are in no limbs yet; several are added at a time, which spares memory traffic.
        limbs: the sum of others, leaves in the order of their sorted paths.
        received: further sums, from other processes.
        template: the form of each leaf, in the order of the mean's leaves.
        bound: what no high limb exceeds.
        since_carry: contributions to the low limbs since their excess was carried.
    """

    count: int = 0
    weight: Fraction = field(default_factory=Fraction)
    waiting: list[Summand] = field(default_factory=list)
    limbs: Limbs | None = None
    received: list[Limbs] = field(default_factory=list)
    template: dict[str, Form] = field(default_factory=dict)
    bound: int = 0
    since_carry: int = 0

    def add(self, contribution: Weighted, known: Extremes | None = None) -> None:
        """Adds ``weight * tree``; its tensors may not be changed in place before the sum is read or sent.

        Args:
            contribution: the weight and the tree.
            known: what :func:`extremes_of` found for leaves of the tree, which then are not looked at.

        Raises:
            NonFiniteError: when a leaf holds NaN or infinity.
            OverflowError: when the magnitudes leave the fixed-point range.
            TypeError: when a leaf is an integer or boolean tensor.
            ValueError: when the weight is not positive, or the tree unlike those before.
        """
        if not (contribution.weight > 0 and math.isfinite(contribution.weight)):
            raise ValueError(f"weights must be positive and finite, got {contribution.weight}")
        template, largest = _inspect(contribution.tree, known)
        bound = _bound(largest, contribution.weight)
        self._admit(template, bound, 1)
        self.waiting.append(Summand(_kept(contribution.tree), contribution.weight, bound))
        self._count(1, _exactly(contribution.weight), bound, 1)

    def merge(self, other: ExactSum) -> None:
        """Adds another partial sum; ``other`` is not used afterwards.

        Raises:
            OverflowError: when the magnitudes leave the fixed-point range.
            ValueError: when the trees are unlike.
        """
        if other.count == 0:
            return
        if self.count == 0:
            self.__dict__.update(other.__dict__)
            return
        self._admit(other.template, other.bound, other.since_carry)
        self.waiting += other.waiting
        self.received += [*other.received, *([] if other.limbs is None else [other.limbs])]
        self._count(other.count, other.weight, other.bound, other.since_carry)

    def fits(self, parts: int) -> bool:
        """Returns whether the sum of n parts, each with the magnitudes of this one, stays in the fixed-point range."""
        return self.bound * parts < HIGH_LIMIT

    def mean(self) -> Tree:
        """The weighted mean, in the leaves' own types; fresh memory of this process, wherever contributions were.

        Raises:
            ValueError: when nothing was added.
        """
        if self.count == 0:
            raise ValueError("the mean of no contributions is undefined")
        if self.count == 1:
            return map_leaves(_fresh, self.waiting[0].tree)
        self._settle()
        parts = self.received if self.limbs is None else [self.limbs, *self.received]
        return _restore(mean_of(parts, float(self.weight)), self.template)

    def mean_without(self, one: Weighted) -> Tree:
        """The weighted mean of all contributions but one of them; the sum stays as it is.

        Args:
            one: the contribution, of this sum. A part of its weight may be named.

        Raises:
            ValueError: when nothing is left.
        """
        rest = self.weight - _exactly(one.weight)
        if not rest > 0:
            raise ValueError("the mean of no contributions is undefined")
        if self.count == 1:
            return map_leaves(_fresh, self.waiting[0].tree)
        self._settle()
        parts = self.received if self.limbs is None else [self.limbs, *self.received]
        taken = Limbs.of([Summand(_kept(one.tree), -float(one.weight), _bound(_largest(one.tree), one.weight))])
        # What all contributions have in common, all others have too.
        taken.common = parts[0].common
        return _restore(mean_of([*parts, taken], float(rest)), self.template)

    def __getstate__(self) -> dict[str, Any]:
        """NumPy arrays instead of tensors: Ray moves them through shared memory without a copy."""
        if self.count > 1:
            self._join()
        state = dict(self.__dict__)
        state["waiting"] = [replace(one, tree=to_numpy(one.tree)) for one in self.waiting]
        state["limbs"] = None if self.limbs is None else self.limbs.on(CPU)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What comes out of the object store is read-only: of trees there are copies, sums are read where they lie."""
        self.__dict__.update(state)
        self.waiting = [replace(one, tree=from_numpy(one.tree)) for one in state["waiting"]]
        self.limbs, self.received = None, [] if state["limbs"] is None else [state["limbs"]]

    def _admit(self, template: dict[str, Form], bound: int, contributions: int) -> None:
        """Makes room for further contributions; refuses these before anything changes."""
        if self.count == 0:
            self.template = template
            return
        if template != self.template:
            every = {**self.template, **template}
            unlike = sorted(path for path in every if self.template.get(path, ()) != template.get(path, ()))
            raise ValueError(f"contributions differ in structure, shape or type at {unlike}")
        if self.bound + bound >= HIGH_LIMIT:
            raise OverflowError(f"the sum of {self.count} weighted contributions and more is too large: {REMEDY}")
        # Leaves in another order are the same sum; which order the mean has must not depend on who came first.
        self.template = min(self.template, template, key=list)
        waiting = len(self.waiting)
        if waiting >= _WAITING or waiting * num_bytes(self.waiting[0].tree if waiting else {}) > _WAITING_BYTES:
            self._settle()
        if len(self.received) > _RECEIVED:
            self._join()
        if self.since_carry + contributions > CARRY_EVERY:
            self._join().carry()
            self.since_carry = 1

    def _settle(self) -> None:
        """Adds what is waiting to the limbs."""
        if self.waiting and self.limbs is None:
            self.limbs = Limbs.of(self.waiting)
        elif self.waiting and self.limbs is not None:
            self.limbs.add(self.waiting)
        self.waiting = []

    def _join(self) -> Limbs:
        """Everything in one sum."""
        self._settle()
        if self.limbs is None:
            self.limbs = self.received.pop().on(CPU, copy=True)
        self.limbs.merge(self.received)
        self.received = []
        return self.limbs

    def _count(self, contributions: int, weight: Fraction, bound: int, since_carry: int) -> None:
        self.count += contributions
        self.weight += weight
        self.bound += bound
        self.since_carry += since_carry


def _exactly(weight: Any) -> Fraction:
    """The weight as the arithmetic sees it."""
    return Fraction(int(weight)) if isinstance(weight, Integral) else Fraction(float(weight))


def _bound(largest: float, weight: Any) -> int:
    """Returns what the high limb of a contribution, with a later carry, does not exceed; capped at the limit."""
    scaled = largest * float(weight) * 2.0**HIGH_BITS
    return int(scaled) + 2 if scaled < HIGH_LIMIT else HIGH_LIMIT


def too_large(contribution: Weighted) -> str:
    """Returns what is too large in a contribution that does not fit into a sum, and what to do."""
    found = [(_largest({"": leaf}), path) for path, leaf in leaves(contribution.tree)]
    largest, path = max(found)
    return f"{path!r} holds up to {largest:.3g} and has the weight {contribution.weight:.6g}: {REMEDY}"


def _largest(tree: Mapping[str, Any], known: Extremes | None = None) -> float:
    """The largest magnitude of all leaves; raises NonFiniteError for the first one with NaN or infinity."""
    paths: list[str] = []
    bounds: list[Any] = []
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor) and not leaf.numel():
            continue
        paths.append(path)
        if known is not None and id(leaf) in known:
            bounds += known[id(leaf)]
        else:
            bounds += leaf.detach().aminmax() if isinstance(leaf, Tensor) else (leaf, leaf)
    numbers, largest = _numbers(bounds), 0.0
    for path, low, high in zip(paths, numbers[::2], numbers[1::2], strict=True):
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NonFiniteError(path)
        largest = max(largest, abs(low), abs(high))
    return largest


def _numbers(scalars: Sequence[Any]) -> list[float]:
    """Scalars as numbers: those of an accelerator in one transfer, as each waits for all of its work."""
    there = [i for i, one in enumerate(scalars) if isinstance(one, Tensor) and one.device.type != "cpu"]
    brought = torch.cat([scalars[i].view(1) for i in there]).cpu().tolist() if there else []
    found = dict(zip(there, brought, strict=True))
    return [found[i] if i in found else float(one) for i, one in enumerate(scalars)]


def _inspect(tree: Mapping[str, Any], known: Extremes | None) -> tuple[dict[str, Form], float]:
    """The form of each leaf and the largest magnitude of all."""
    template: dict[str, Form] = {}
    for path, leaf in leaves(tree):
        if isinstance(leaf, Tensor) and not leaf.dtype.is_floating_point:
            raise TypeError(f"only floating-point tensors can be averaged, {path!r} is {leaf.dtype}")
        template[path] = (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else None
    return template, _largest(tree, known)


def _kept(tree: Mapping[str, Any]) -> Tree:
    """Returns the tree with plain numbers as floats, as they are after averaging."""
    return map_leaves(lambda leaf: leaf if isinstance(leaf, Tensor) else float(leaf), tree)


def _fresh(leaf: Any, dtype: torch.dtype | None = None) -> Any:
    return leaf.detach().to(CPU, dtype or leaf.dtype, copy=True) if isinstance(leaf, Tensor) else leaf


def _restore(flat: Tensor, template: Mapping[str, Form]) -> Tree:
    sizes = {path: 1 if form is None else math.prod(form[0]) for path, form in template.items()}
    paths = sorted(template)
    parts = dict(zip(paths, torch.split(flat, [sizes[path] for path in paths]), strict=True))
    # Copies: leaves start where a fresh allocation does, and share no memory.
    return from_leaves(
        {
            path: float(parts[path]) if form is None else _fresh(parts[path].reshape(form[0]), form[1])
            for path, form in template.items()
        }
    )
