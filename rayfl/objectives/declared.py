"""Deprecated: objectives say what they are by being sums of terms, see :mod:`rayfl.objectives.terms`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Objective = TypeVar("Objective", bound=Callable[..., Any])


def declared_by(rule: Callable[[Any], Any]) -> Callable[[Objective], Objective]:
    """Does nothing but warn: the objective is differentiated by autograd."""
    warnings.warn(
        "declared_by has no effect since rayfl 0.2: write the objective as a sum of terms (rayfl.objectives)",
        DeprecationWarning,
        stacklevel=2,
    )
    return lambda objective: objective
