"""Exact aggregation: sums that do not depend on grouping or order.

Weighted values are summed as integers (see :mod:`rayfl.aggregation.limbs`). Integer sums are associative, so any number
of actors, any tree and any order of arrival give the same bits. One division at the end gives the mean. Where all
contributions agree to the bit the mean is that value, whatever its type and magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from rayfl.aggregation.contributions import REMEDY, Form, Inspected, bound_of, exactly, with_floats
from rayfl.aggregation.contributions import Weighted as Weighted
from rayfl.aggregation.fixed_point import CARRY_EVERY, CPU, HIGH_LIMIT
from rayfl.aggregation.limbs import Limbs, Summand, mean_of
from rayfl.aggregation.magnitudes import Extremes, largest
from rayfl.errors import MethodError
from rayfl.params import Tree, from_leaves, from_numpy, map_leaves, to_numpy

MAX_WAITING_BYTES = 64 << 20
"""Bytes of contributions that wait to be added, but for the newest: their memory is then better used for the next."""
MAX_WAITING = 16
"""Contributions that wait to be added."""
MANY_SMALL = 256
"""Contributions that may wait if they are small: a call then costs more than what it adds."""
MANY_SMALL_BYTES = 4 << 20
"""Bytes of that number of contributions, at most, if they are small."""
MAX_RECEIVED = 8
"""Sums of other processes that are kept apart."""
MAX_RECEIVED_BYTES = 1 << 30
"""Bytes of the sums of other processes that are kept apart; one is, whatever its size."""
_LIMBS_BYTES = 16
"""Of an element of a sum: two integers of 64 bits."""


_LEAST_WEIGHT = 2.0**-32
"""Of all contributions together; a mean then is exact to 2^-40 for each of them."""


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
        waiting: contributions not yet added to the limbs; several are added at a time, which saves memory traffic.
        limbs: the sum of others, leaves in the order of their sorted paths.
        received: further sums, from other processes.
        template: the form of each leaf, in the order of the mean's leaves.
        bound: upper bound of all high limbs.
        since_carry: contributions to the low limbs since the last carry.
        most: how many contributions may wait.
    """

    count: int = 0
    weight: Fraction | int = 0
    waiting: list[Summand] = field(default_factory=list)
    limbs: Limbs | None = None
    received: list[Limbs] = field(default_factory=list)
    template: dict[str, Form] = field(default_factory=dict)
    bound: int = 0
    since_carry: int = 0
    most: int = 0

    def add(self, contribution: Weighted, known: Extremes | None = None) -> None:
        """Adds ``weight * tree``; its tensors may not be changed in place before the sum is read or sent.

        Args:
            contribution: the weight and the tree.
            known: extremes of leaves by :func:`extremes_of`, so that these leaves are not scanned again.

        Raises:
            NonFiniteError: when a leaf holds NaN or infinity.
            OverflowError: when the magnitudes leave the fixed-point range.
            TypeError: when a leaf is an integer or boolean tensor, or neither a tensor nor a number.
            ValueError: when the weight is not positive, or the tree's structure differs from earlier ones.
        """
        self.take(Inspected.of(contribution, known))

    def take(self, one: Inspected) -> None:
        """Adds a checked contribution; raises the errors of :meth:`add` that depend on other contributions."""
        self._admit(one.template, one.summand.bound, 1)
        self.waiting.append(one.summand)
        self._count(1, one.weight, one.summand.bound, 1)

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

    def mean(self) -> Tree:
        """Returns the weighted mean, in the leaves' own types, in new memory.

        Raises:
            MethodError: when the total weight is too small for a precise mean.
            ValueError: when nothing was added.
        """
        if self.count == 0:
            raise ValueError("the mean of no contributions is undefined")
        if self.count == 1:
            return map_leaves(_fresh, self.waiting[0].tree)
        _check_weight(self.weight)
        self._settle()
        parts = self.received if self.limbs is None else [self.limbs, *self.received]
        return _restore(mean_of(parts, float(self.weight)), self.template)

    def mean_without(self, one: Weighted) -> Tree:
        """Returns the weighted mean without one contribution; the sum is unchanged.

        Args:
            one: the contribution, of this sum. A part of its weight may be named.

        Raises:
            MethodError: see :meth:`mean`.
            ValueError: when nothing is left.
        """
        rest = self.weight - exactly(one.weight)
        if not rest > 0:
            raise ValueError("the mean of no contributions is undefined")
        if self.count == 1:
            return map_leaves(_fresh, self.waiting[0].tree)
        _check_weight(rest)
        self._settle()
        parts = self.received if self.limbs is None else [self.limbs, *self.received]
        taken = Limbs.of([Summand(with_floats(one.tree), -float(one.weight), bound_of(largest(one.tree), one.weight))])
        # Values on which all contributions agree are also those of all but one.
        taken.common = parts[0].common
        return _restore(mean_of([*parts, taken], float(rest)), self.template)

    def joined(self) -> Limbs:
        """Returns all contributions as one sum of integers, which may be read-only memory of another process."""
        if len(self.received) == 1 and self.limbs is None and not self.waiting:
            return self.received[0]
        return self._join()

    def __getstate__(self) -> dict[str, Any]:
        """NumPy arrays instead of tensors: Ray moves them through shared memory without a copy."""
        if self.count > 1 and (self.waiting or self.received):
            self._join()
        state = dict(self.__dict__)
        state["waiting"] = [replace(one, tree=to_numpy(one.tree)) for one in self.waiting]
        state["limbs"] = None if self.limbs is None else self.limbs.on(CPU)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrays from the object store are read-only: copies trees, reads sums in place."""
        self.__dict__.update(state)
        self.waiting = [replace(one, tree=from_numpy(one.tree)) for one in state["waiting"]]
        self.limbs, self.received = None, [] if state["limbs"] is None else [state["limbs"]]

    def _admit(self, template: dict[str, Form], bound: int, contributions: int) -> None:
        """Prepares for further contributions; raises before anything changes if they do not fit."""
        if self.count == 0:
            self.template, self.most = template, _most_waiting(template)
            return
        if template != self.template:
            every = {**self.template, **template}
            unlike = sorted(path for path in every if self.template.get(path, ()) != template.get(path, ()))
            raise ValueError(f"contributions differ in structure, shape or type at {unlike}")
        if self.bound + bound >= HIGH_LIMIT:
            raise OverflowError(f"the sum of {self.count} weighted contributions and more is too large: {REMEDY}")
        # The leaves' order does not affect the sum, and the mean's order must not depend on who came first.
        if list(template) < list(self.template):
            self.template = template
        if len(self.waiting) >= self.most:
            self._settle()
        if len(self.received) > min(MAX_RECEIVED, max(MAX_RECEIVED_BYTES // max(nbytes_of(self.template), 1), 1)):
            self._join()
        if self.since_carry + contributions > CARRY_EVERY:
            self._join().carry()
            self.since_carry = 1

    def _settle(self) -> None:
        """Adds waiting contributions to the limbs."""
        if self.waiting and self.limbs is None:
            self.limbs = Limbs.of(self.waiting)
        elif self.waiting and self.limbs is not None:
            self.limbs.add(self.waiting)
        self.waiting = []

    def _join(self) -> Limbs:
        """Joins waiting and received contributions into one sum."""
        self._settle()
        if self.limbs is None:
            self.limbs = self.received.pop().on(CPU, copy=True)
        self.limbs.merge(self.received)
        self.received = []
        return self.limbs

    def _count(self, contributions: int, weight: Fraction | int, bound: int, since_carry: int) -> None:
        self.count += contributions
        self.weight += weight
        self.bound += bound
        self.since_carry += since_carry


def nbytes_of(template: Mapping[str, Form]) -> int:
    """Returns how many bytes a sum of several contributions of a form has."""
    return _LIMBS_BYTES * sum(1 if form is None else math.prod(form[0]) for form in template.values())


def _most_waiting(template: Mapping[str, Form]) -> int:
    """Returns how many contributions of a form may wait."""
    each = sum(8 if form is None else math.prod(form[0]) * form[1].itemsize for form in template.values())
    if each * MANY_SMALL <= MANY_SMALL_BYTES:
        return MANY_SMALL
    return min(max(MAX_WAITING_BYTES // each + 1, 1), MAX_WAITING)


def _check_weight(total: Fraction | int) -> None:
    if total < _LEAST_WEIGHT:
        raise MethodError(
            f"the weights of a mean are {float(total):.3g} in all. Weighted values are summed in units of 2^-72, so "
            "that few digits would be right: multiply the weights by a constant that is the same for all clients"
        )


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
