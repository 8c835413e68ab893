"""What methods declare of their objectives, so that the engine need not call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

Objective = TypeVar("Objective", bound=Callable[..., Tensor])
_DECLARED = "_rayfl_declared"


@dataclass(frozen=True)
class Pull:
    """``factor / 2 ||theta - anchor||^2`` over all parameters.

    Attributes:
        anchor: the entry of what the objective is given as ``frozen``, a tree with all parameters of the model.
        factor: its gradient is ``factor (theta - anchor)``.
    """

    anchor: str
    factor: float


@dataclass(frozen=True)
class Envelope:
    """``factor / 2 ||theta - w||^2`` with a w that is trained too, and moves at some of the steps only.

    At those the gradient of w is ``factor (w - theta)``, and theta is already pulled to ``w + share (theta - w)``.

    Attributes:
        centre: the entry of what is trained that is w, a model of the same network.
        due: the entry of the draws that is 1 where w moves and else 0.
        share: the entry of what the objective is given as ``frozen``, a number.
        factor: see above.
    """

    centre: str
    due: str
    share: str
    factor: float


@dataclass(frozen=True)
class Mixture:
    """``task.loss`` at ``(1 - c) start + c end`` with a drawn c, and ``orthogonality cos^2(start, end)``.

    Attributes:
        start: an entry of what is trained, a model of the task's network.
        end: another one.
        coefficient: the entry of the draws with c, a scalar, or a vector with one number a group.
        groups: which parameters share a number, given the task, by their names; None if all do.
        orthogonality: the factor of the squared cosine of the angle between the two.
    """

    start: str
    end: str
    coefficient: str
    groups: Callable[[Any], Sequence[Sequence[str]]] | None = None
    orthogonality: float = 0.0


@dataclass(frozen=True)
class Declared:
    """An objective that is ``task.loss`` of a model, and a pull besides.

    Attributes:
        pull: of that model; with a mixture, of its start. None for the loss alone.
        model: the entry of what is trained that is the model; None if all of it is.
        mixture: what the model is instead, if it is made of two.
        envelope: a pull towards what is trained too; only with a ``model`` and without the others.
    """

    pull: Pull | None = None
    model: str | None = None
    mixture: Mixture | None = None
    envelope: Envelope | None = None


def loss_of_the_task(objective: Objective) -> Objective:
    """Declares an objective to be ``task.loss(trainable, batch)`` and nothing else."""
    setattr(objective, _DECLARED, lambda *_: Declared())
    return objective


def declared_by(rule: Callable[[Any], Declared | None]) -> Callable[[Objective], Objective]:
    """Declares a method's objective to be what ``rule`` says of the method; None where it is something else."""

    def declare(objective: Objective) -> Objective:
        setattr(objective, _DECLARED, rule)
        return objective

    return declare


def declared(objective: Callable[..., Tensor]) -> Declared | None:
    """What was declared of an objective (of the function, where it is a method); None if nothing was."""
    rule = getattr(objective, _DECLARED, None)
    found: Declared | None = None if rule is None else rule(getattr(objective, "__self__", None))
    return found


def is_loss_of_the_task(objective: Callable[..., Tensor]) -> bool:
    """Whether that was declared of it."""
    return declared(objective) == Declared()
