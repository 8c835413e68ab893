"""What the terms of an objective read: named trees, parts of them, and interpolations between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from rayfl.errors import MethodError
from rayfl.objectives.numbers import Factor, Read, evaluated
from rayfl.params import Tree, leaves, map_leaves

TRAINED = ""
"""The name of the trained tree itself."""


Groups = Callable[[Any], Sequence[Sequence[str]]]
"""Given the task, the names of the parameters that share a coefficient, group by group."""


@dataclass(frozen=True)
class Constant:
    """A name whose tensors a term treats as constants (stop-gradient), although they may be trained."""

    name: str


Name = str | Constant


@dataclass(frozen=True)
class Scope:
    """The arguments of an objective in one step."""

    trained: Mapping[str, Any]
    task: Any
    frozen: Any = None
    draw: Any = None
    measured: Any = None

    def tree(self, name: Name) -> Any:
        """Returns the tree (or tensor) under a name; detached if it is a constant.

        Raises:
            KeyError: when there is no such name; lists those that exist.
        """
        if isinstance(name, Constant):
            return map_leaves(Tensor.detach, self.tree(name.name))
        if name == TRAINED:
            return self.trained
        for entries in (self.trained, self.frozen or {}):
            if name in entries:
                return entries[name]
        names = sorted([*self.trained, *(self.frozen or {})])
        raise KeyError(f"an objective's term names {name!r}, which is neither trained nor frozen: there are {names}")

    def number(self, factor: Factor) -> Any:
        """The value of a number."""
        return evaluated(factor, self.source)

    def source(self, number: Read) -> Any:
        """Returns the value of a named number."""
        return {"draw": self.draw, "frozen": self.frozen, "measured": self.measured}[number.source][number.name]

    def parameters(self, name: Name) -> Tree:
        """Returns the tensors under a name by path, without buffers."""
        buffers = self.task.network.buffer_names
        return {path: leaf for path, leaf in leaves(self.tree(name)) if path.rpartition("/")[2] not in buffers}


class Share(NamedTuple):
    """A part of a parameter of a model: ``coefficient`` times a tensor, or one row of it.

    Attributes:
        of: the name under which the tensor lies.
        path: where it lies there.
        coefficient: its factor.
        row: which entry along dimension 0; None for the whole tensor.
        group: which entry of the coefficient's value, where that is a vector; None where it is a scalar.
    """

    of: Name
    path: str
    coefficient: Factor = 1
    row: int | None = None
    group: int | None = None


class Point(ABC):
    """A model at which a loss is evaluated: its parameters are sums of shares of trained and frozen tensors."""

    @abstractmethod
    def shares(self, scope: Scope) -> Mapping[str, Sequence[Share]]:
        """Returns the shares of each parameter; a single one, with coefficient 1, is the tensor itself."""

    @abstractmethod
    def base(self, scope: Scope) -> Tree:
        """Returns a new tree of the model whose buffers are used; not copied, since a forward pass writes to them."""

    def model(self, scope: Scope) -> Tree:
        """Returns the model, differentiable with respect to trained tensors."""
        found = self.base(scope)
        for name, parts in self.shares(scope).items():
            found[name] = _sum_of(parts, scope)
        return found


@dataclass(frozen=True)
class At(Point):
    """The model under a name; missing tensors may come from another model, as constants."""

    name: str
    completed_by: str | None = None

    def shares(self, scope: Scope) -> Mapping[str, Sequence[Share]]:
        """See :class:`Point`."""
        own, names = scope.tree(self.name), scope.task.network.parameter_names
        rest = names if self.completed_by is not None else ()
        lent = {name: [Share(Constant(self.completed_by or ""), name)] for name in rest}
        return {**lent, **{name: [Share(self.name, name)] for name in names if name in own}}

    def base(self, scope: Scope) -> Tree:
        """See :class:`Point`."""
        lent = {} if self.completed_by is None else scope.tree(self.completed_by)
        return {**lent, **scope.tree(self.name)}


@dataclass(frozen=True)
class Line(Point):
    """The model ``(1 - coefficient) start + coefficient end``; see :func:`line`."""

    start: Name
    end: Name
    coefficient: Factor
    groups: Groups | None = None
    buffers_of: str | None = None

    def shares(self, scope: Scope) -> Mapping[str, Sequence[Share]]:
        """See :class:`Point`.

        Raises:
            MethodError: when tensors between which it mixes differ in shape.
        """
        names = scope.task.network.parameter_names
        grouped = [names] if self.groups is None else self.groups(scope.task)
        one, other = (dict(leaves(scope.tree(name))) for name in (self.start, self.end))
        for name in (name for names in grouped for name in names if name in one and name in other):
            if one[name].shape != other[name].shape:
                raise MethodError(
                    f"line({bare(self.start)!r}, {bare(self.end)!r}) needs equal shapes, but {name!r} has shape "
                    f"{tuple(one[name].shape)} here and {tuple(other[name].shape)} there"
                )
        return {name: [Share(self.start, name)] for name in names} | {
            name: [
                Share(self.start, name, 1 - self.coefficient, None, None if self.groups is None else group),
                Share(self.end, name, self.coefficient, None, None if self.groups is None else group),
            ]
            for group, names in enumerate(grouped)
            for name in names
        }

    def base(self, scope: Scope) -> Tree:
        """See :class:`Point`."""
        return dict(scope.tree(self.start if self.buffers_of is None else self.buffers_of))


def line(
    start: Name, end: Name, coefficient: Factor, groups: Groups | None = None, buffers_of: str | None = None
) -> Line:
    """Returns the point ``(1 - coefficient) start + coefficient end`` between two models; exact at 0 and at 1.

    Args:
        start: a model.
        end: a model of the same network.
        coefficient: a number, or with groups a vector with one entry for each.
        groups: which parameters share an entry, others are the start's; None if all share one number.
        buffers_of: whose buffers the mixed model has; default the start's.
    """
    return Line(start, end, coefficient, groups, buffers_of)


def bare(name: Name) -> str:
    """Returns the plain name, also of a constant."""
    return name.name if isinstance(name, Constant) else name


def _times(factor: Any, value: Tensor) -> Tensor:
    return value if isinstance(factor, int | float) and factor == 1 else factor * value


def _sum_of(parts: Sequence[Share], scope: Scope) -> Tensor:
    """Computes a parameter from its shares."""
    total: Tensor | None = None
    for part in parts:
        found = dict(leaves(scope.tree(part.of)))[part.path] if part.path else scope.tree(part.of)
        weight = scope.number(part.coefficient)
        weight = weight if part.group is None else weight[part.group]
        tensor = _times(weight, found if part.row is None else found[part.row])
        total = tensor if total is None else total + tensor
    assert total is not None
    return total
