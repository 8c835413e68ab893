"""Values held per sample, in the order in which mini-batches take the samples."""

from __future__ import annotations

import numpy as np

from rayfl.engine.updates.batches import BatchPlan
from rayfl.params import Tree


def by_step(rows: np.ndarray, plan: BatchPlan, width: int, generator: np.random.Generator, steps: int) -> Tree:
    """The rows of each step's samples as ``rows`` of shape (steps, width, M), filled up with zeros.

    Args:
        rows: of all samples, shape (n, M).
        plan: which samples make which mini-batch.
        width: samples of the largest mini-batch that any client has.
        generator: not needed, as nothing here is random.
        steps: how many there are.
    """
    sizes = np.diff(plan.bounds)
    found = np.zeros((steps, width, rows.shape[1]))
    for step, (begin, size) in enumerate(zip(plan.bounds[:-1], sizes, strict=True)):
        found[step, :size] = rows[plan.order[begin : begin + size]]
    return {"rows": found}
