"""How likely several models find the classes of a client's training samples."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.client import Client
from rayfl.tasks.base import Model


async def losses_of_samples(client: Client, models: Iterable[Model]) -> Tensor:
    """Returns minus the logarithm of the probability of each training sample's class, in evaluation mode.

    Args:
        client: with n > 0 training samples of one class each.
        models: q of them.

    Returns:
        Shape (n, q).
    """
    labels, found = client.examples().y, []
    for model in models:
        rows = await client.outputs(partial(log_probabilities, model))
        found.append(-rows.gather(1, labels[:, None])[:, 0])
    return torch.stack(found, 1)


def log_probabilities(model: Model, x: Tensor, task: Any) -> Tensor:
    """Log-probabilities of one model in evaluation mode, shape (b, C)."""
    found: Tensor = task.network.logits(model, x, training=False).log_softmax(-1)
    return found
