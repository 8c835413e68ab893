"""Objectives as sums of terms, as papers write them.

For example SuPerFed's, with the federated model w^f, the local model w^l and the received model w^g:

    loss(at=line("federated", "local", drawn("coefficient")))
    + mu * squared_distance("federated", "received")
    + nu * squared_cosine("federated", "local")

A sum can be called like any objective, ``(trained, batch, task, frozen, draw) -> scalar``, and autograd differentiates
it. The engine can also read its terms: it knows their gradients and builds no autograd graph for the penalties.

A name is a key of the trained tree, or else of ``frozen``; :data:`TRAINED` is the trained tree itself. Penalties are
over the parameters under the first name, without buffers; the second may have more tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rayfl.errors import MethodError
from rayfl.objectives.numbers import Factor, Number, Read
from rayfl.objectives.pairs import COSINE, DISTANCE, PRODUCT, Pair
from rayfl.objectives.points import TRAINED, At, Constant, Name, Point, Scope, _times, bare
from rayfl.params import Tree, leaves


class Term(ABC):
    """A term of a sum."""

    @abstractmethod
    def value(self, scope: Scope, batch: Any) -> Tensor:
        """Returns its value, a scalar, for autograd."""


@dataclass(frozen=True)
class Loss(Term):
    """The task's loss of a mini-batch for a given model."""

    at: Point

    def value(self, scope: Scope, batch: Any) -> Tensor:
        """See :class:`Term`."""
        found: Tensor = scope.task.loss(self.at.model(scope), batch)
        return found


@dataclass(frozen=True)
class Penalty(Term):
    """A function of two vectors: the parameters under two names."""

    pair: Pair
    of: Name
    to: Name

    def value(self, scope: Scope, batch: Any) -> Tensor:
        """See :class:`Term`."""
        return self.pair.value(*self.sides(scope))

    def sides(self, scope: Scope) -> tuple[Tree, Tree]:
        """Returns the tensors under both names by path.

        Raises:
            MethodError: when two of them differ in shape.
        """
        one, other = scope.parameters(self.of), dict(leaves(scope.tree(self.to)))
        for path, tensor in one.items():
            if tensor.shape != other[path].shape:
                raise MethodError(
                    f"{self.pair.name}({bare(self.of)!r}, {bare(self.to)!r}) needs equal shapes, but "
                    f"{path!r} has shape {tuple(tensor.shape)} here and {tuple(other[path].shape)} there"
                )
        return one, {path: other[path] for path in one}


@dataclass(frozen=True)
class Function(Term):
    """Any pure function with an objective's arguments."""

    of: Callable[..., Tensor]

    def value(self, scope: Scope, batch: Any) -> Tensor:
        """See :class:`Term`."""
        return self.of(scope.trained, batch, scope.task, scope.frozen, scope.draw)


@dataclass(frozen=True)
class Sum:
    """An objective that is a sum of terms, each with its factor.

    Attributes:
        terms: factors and terms.
    """

    terms: tuple[tuple[Factor, Term], ...]

    def __call__(self, trained: Any, batch: Any, task: Any, frozen: Any = None, draw: Any = None) -> Tensor:
        """Returns the value, a scalar, for autograd and ``vmap``.

        Raises:
            MethodError: when there are no terms.
        """
        scope, total = Scope(trained, task, frozen, draw), None
        for factor, term in self.terms:
            value = _times(scope.number(factor), term.value(scope, batch))
            total = value if total is None else total + value
        if total is None:
            raise MethodError("the objective has no terms: all its factors are 0, so that nothing is left to train on")
        return total

    def __add__(self, other: Sum | Callable[..., Tensor]) -> Sum:
        return Sum(self.terms + (other if isinstance(other, Sum) else function(other)).terms)

    __radd__ = __add__

    def __neg__(self) -> Sum:
        return -1 * self

    def __sub__(self, other: Sum | Callable[..., Tensor]) -> Sum:
        return self + -1 * (other if isinstance(other, Sum) else function(other))

    def __rsub__(self, other: Callable[..., Tensor]) -> Sum:
        return -self + other

    def __mul__(self, factor: Factor) -> Sum:
        return Sum(tuple((factor if own == 1 else factor * own, term) for own, term in self.terms if factor != 0))

    __rmul__ = __mul__

    def __truediv__(self, divisor: int | float) -> Sum:
        return self * (1 / divisor)

    @property
    def readable(self) -> bool:
        """Returns whether there are terms, and every one has a known gradient."""
        known = (isinstance(t, Loss) or (isinstance(t, Penalty) and t.pair.slopes is not None) for _, t in self.terms)
        return bool(self.terms) and all(known)


def loss(at: str | Point = TRAINED, completed_by: str | None = None) -> Sum:
    """Returns the task's loss of the mini-batch as a term.

    Args:
        at: the model: a name, or a point such as a :func:`line`.
        completed_by: name of a model with the tensors that ``at`` lacks, used as constants; only if ``at`` is a name.
    """
    return Sum(((1, Loss(At(at, completed_by) if isinstance(at, str) else at)),))


def penalty(pair: Pair, of: Name, to: Name) -> Sum:
    """Returns a function of two trees as a term; it has gradients in each side that is trained and not a constant."""
    return Sum(((1, Penalty(pair, of, to)),))


def squared_distance(of: Name, to: Name) -> Sum:
    """``||of - to||^2``; see :func:`penalty`."""
    return penalty(DISTANCE, of, to)


def inner_product(of: Name, to: Name) -> Sum:
    """``<of, to>``; see :func:`penalty`."""
    return penalty(PRODUCT, of, to)


def squared_cosine(of: Name, to: Name) -> Sum:
    """``cos^2`` of the angle between all parameters of both as one vector each; see :func:`penalty`."""
    return penalty(COSINE, of, to)


def envelope(of: str, centre: str, due: Factor, pull: Factor) -> Sum:
    """``1/2 ||of - centre||^2`` for a centre that is trained too, but moves at some of the steps only.

    Where ``due`` is 1, the centre moves by the share ``pull`` of its way to ``of`` (its gradient is the distance), and
    ``of`` is pulled to where the centre then is. Where it is 0, the centre stays.

    Args:
        of: a model.
        centre: its parameters, under a learning rate that makes such a step ``pull``.
        due: 1 or 0.
        pull: the share.
    """
    pulled = squared_distance(of, Constant(centre)) * (1 - due * pull)
    return (pulled + squared_distance(centre, Constant(of)) * due) / 2


def function(of: Callable[..., Tensor]) -> Sum:
    """Returns a pure function with an objective's arguments as a term, differentiated by autograd."""
    return Sum(((1, Function(of)),))


def constant(name: str) -> Constant:
    """Returns the tensors under a name as constants: the term has no gradient there."""
    return Constant(name)


def drawn(name: str) -> Number:
    """Returns the number drawn for the step, an entry of ``draw``."""
    return Read("draw", name)


def frozen(name: str) -> Number:
    """Returns a number that is constant during a local update, an entry of ``frozen``."""
    return Read("frozen", name)
