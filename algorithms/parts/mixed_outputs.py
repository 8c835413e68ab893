"""Two models whose logits are mixed with one weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayfl.tasks.base import Model, Predictor


def mixed_logits(first: Tensor, second: Tensor, share: float | Tensor) -> Tensor:
    """(1 - share) first + share second, exact at 0 and at 1.

    Args:
        first: logits of one model.
        second: those of the other, of the same shape.
        share: weight of the second.
    """
    return torch.lerp(first, second, share)


def mixing(first: Model, second: Model, share: float | Tensor) -> Predictor:
    """What predicts by :func:`mixed_logits` of two models."""
    return Predictor.of(first, second, combine=partial(_predictions, share))


def _predictions(share: float | Tensor, models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Returns what the mixture predicts, as the task scores it."""
    first, second = (task.network.logits(model, x, training=False) for model in models)
    found: Tensor = task.predicted(mixed_logits(first, second, share))
    return found
