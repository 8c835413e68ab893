"""Scores predictors on one client's splits, in large batches."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rayfl.data.federated import Examples
from rayfl.metrics import Statistics, batch_statistics
from rayfl.tasks import Predictor, Task


def evaluate(
    predictors: Mapping[str, Predictor], examples: Examples, task: Task, batch_size: int
) -> dict[str, Statistics]:
    """The mergeable statistics of each predictor over ``examples``.

    The batches are consecutive and of fixed size, so the sums do not depend on who evaluates.
    """
    totals = {}
    # Copies: how a slice is aligned depends on where the process read the samples to, a fresh tensor is always alike.
    batches = [
        (examples.x[start : start + batch_size].clone(), examples.y[start : start + batch_size])
        for start in range(0, len(examples), batch_size)
    ]
    with torch.no_grad():
        for name, predictor in predictors.items():
            models = predictor.built()
            parts = [batch_statistics(predictor.log_probabilities(models, x, task), y) for x, y in batches]
            totals[name] = (
                Statistics.from_vector(torch.stack(parts).sum(0).cpu().numpy()) if parts else Statistics.empty()
            )
    return totals
