"""Symbolic numbers in objectives: drawn or frozen ones by name, and arithmetic on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


class Number:
    """A symbolic number whose value is known when a step runs."""

    def __add__(self, other: Factor) -> Number:
        return Arithmetic("+", self, other)

    def __mul__(self, other: Factor) -> Number:
        return Arithmetic("*", self, other) if isinstance(other, Number | int | float) else NotImplemented

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> Number:
        return -1 * self

    def __truediv__(self, divisor: float) -> Number:
        return self * (1 / divisor) if isinstance(divisor, int | float) else NotImplemented

    def __sub__(self, other: Factor) -> Number:
        return self + -1 * other

    def __rsub__(self, other: Factor) -> Number:
        return -1 * self + other


Factor = Number | int | float


@dataclass(frozen=True)
class Read(Number):
    """A named number: from ``draw`` or ``frozen``, or ``measured`` by the engine during the step."""

    source: Literal["draw", "frozen", "measured"]
    name: str


@dataclass(frozen=True)
class Arithmetic(Number):
    """The sum or the product of two numbers."""

    sign: Literal["+", "*"]
    left: Factor
    right: Factor


def evaluated(factor: Factor, read: Callable[[Read], Any]) -> Any:
    """Evaluates a number; ``read`` looks up named ones."""
    if isinstance(factor, Arithmetic):
        left, right = evaluated(factor.left, read), evaluated(factor.right, read)
        return left + right if factor.sign == "+" else left * right
    return read(factor) if isinstance(factor, Read) else factor


def measured(name: str) -> Number:
    """Returns a number that the engine computes during a step."""
    return Read("measured", name)


def is_measured(factor: Factor, of: str = "") -> bool:
    """Returns whether a number depends on measured ones (whose names begin with ``of`` and a point)."""
    if isinstance(factor, Arithmetic):
        return is_measured(factor.left, of) or is_measured(factor.right, of)
    return isinstance(factor, Read) and factor.source == "measured" and of in ("", factor.name.partition(".")[0])
