"""The loss of each sample, as a task's measures find it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rayfl.examples import Examples
from rayfl.metrics.measures import MeasuresBySample
from rayfl.tasks.predictor import Predictor

_ROWS = 64


@torch.no_grad()
def sample_losses(predictor: Predictor, task: Any, examples: Examples, rows: int = _ROWS) -> np.ndarray:
    """Returns the loss of each sample, float64 of shape (n,).

    Args:
        predictor: the model.
        task: what is learned; its loss does not compare samples.
        examples: n samples.
        rows: samples of a pass.
    """
    built, sums = predictor.built(), [np.zeros((0, task.measures.size))]
    for x, y in zip(torch.split(examples.x, rows), torch.split(examples.y, rows), strict=True):
        if not task.scored_by_predictions:
            pairs = zip(torch.split(x, 1), torch.split(y, 1), strict=True)
            sums += [task.statistics(predictor, built, *pair).cpu().numpy()[None] for pair in pairs]
            continue
        predicted = predictor.predictions(built, x.clone(), task, task.asked(y))
        if isinstance(task.measures, MeasuresBySample):  # each sample is a set of its own
            found = [values.unsqueeze(1) for values in task.measures.by_sample(predicted, y)]
            sums.append(task.measures.added(found).double().cpu().numpy())
            continue
        each = (task.measures.statistics(predicted[n : n + 1], y[n : n + 1]) for n in range(len(y)))
        sums += [vector.cpu().numpy()[None] for vector in each]
    losses: np.ndarray = task.measures.values(np.concatenate(sums))["loss"]
    return losses
