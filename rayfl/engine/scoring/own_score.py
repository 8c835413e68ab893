"""Scores a predictor on one of a client's splits, while the client's procedure waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayfl.examples import Examples
from rayfl.metrics import Statistics
from rayfl.tasks.base import Predictor, Task
from rayfl.tasks.beside_training import TaskBesideTraining

Outputs = Callable[..., Awaitable[Tensor]]
"""``outputs(function, x, task=...)``: rows that a function of batches makes of x; see ``Client.outputs``."""


async def own_score(
    outputs: Outputs, predictor: Predictor, examples: Examples, training: Examples, own: bool, task: Task
) -> Statistics:
    """Returns the task's metrics of a predictor, in evaluation mode.

    Args:
        outputs: runs a function on batches.
        predictor: the model.
        examples: the samples.
        training: the client's training samples.
        own: whether ``examples`` are these.
        task: of the predictor.
    """
    if not len(examples):
        return Statistics.empty(task.measures)
    models = predictor.built()
    if isinstance(task, TaskBesideTraining):
        found = []
        for function, count in task.passes(predictor, models, examples, training):
            numbers = torch.arange(count, device=examples.x.device)
            found.append(await outputs(partial(_of_numbers, function), numbers, task=task))
        return Statistics.from_vector(task.assessed(found, examples, training, own), task.measures)
    if getattr(task.network, "output_rows", None):  # all predictions would not fit into memory
        both = torch.stack([examples.x, examples.y], -1)
        sums = await outputs(
            lambda xy, task: task.statistics(predictor, models, xy[..., 0], xy[..., 1])[None], both, task=task
        )
        return Statistics.from_vector(sums.sum(0), task.measures)
    rows = await outputs(lambda x, task: predictor.predictions(models, x, task), examples.x, task=task)
    targets = task.measures.targets(examples.y, examples.group)
    return Statistics.from_vector(task.measures.statistics(rows, targets), task.measures)


def _of_numbers(function: Callable[[Tensor], Tensor], numbers: Tensor, task: Any) -> Tensor:
    return function(numbers)
