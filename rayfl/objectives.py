"""What methods declare of their objectives, so that the engine need not call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

Objective = TypeVar("Objective", bound=Callable[..., Tensor])
_DECLARED = "_rayfl_declared"


@dataclass(frozen=True)
class Pull:
    """``factor / 2 ||theta - anchor||^2`` over all parameters.

    Attributes:
        anchor: the entry of what the objective is given as ``frozen``, a tree that has all parameters that are trained.
        factor: its gradient is ``factor (theta - anchor)``.
    """

    anchor: str
    factor: float


@dataclass(frozen=True)
class Declared:
    """An objective that is ``task.loss(trainable, batch)``, and a pull besides.

    Attributes:
        pull: None for the loss alone.
    """

    pull: Pull | None = None


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
