"""The line between two models: coefficients that training draws, and points that are evaluated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rayfl.engine.client import Draw
from rayfl.engine.scoring.mixtures import Mixture
from rayfl.params import Tree
from rayfl.tasks.base import Model, Predictor, Task

GRID = tuple(round(0.1 * i, 1) for i in range(11))
"""Mixing coefficients lambda that are evaluated: 0 is one end, 1 the other."""

Point = Callable[[Model, Model, float, Task], Callable[[], Model]]
"""What makes the model at a coefficient, from (start, end, coefficient, task), when it is called."""


def points(start: Model, end: Model, task: Task, kind: Point = Mixture) -> dict[str, Predictor]:
    """Returns the models of the grid, as rows ``lambda=0.0`` to ``lambda=1.0``."""
    return {f"lambda={value}": Predictor.of(kind(start, end, value, task)) for value in GRID}


def coefficients(shape: tuple[int, ...], fixed: float | None) -> Draw:
    """Returns a draw of ``coefficient``, of shape (steps, *shape): uniform in [0, 1), or always the same number.

    Args:
        shape: () for one coefficient a step, (l,) for one of each of l groups of tensors.
        fixed: that number; None to draw.
    """

    def draw(generator: np.random.Generator, steps: int) -> Tree:
        whole = (steps, *shape)
        return {"coefficient": generator.random(whole) if fixed is None else np.full(whole, fixed)}

    return draw
