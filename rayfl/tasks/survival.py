"""The task survival: the risk of an event whose time may be censored."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from torch import Tensor

from rayfl.metrics import Measures
from rayfl.metrics.survival import SurvivalMeasures, cox_losses
from rayfl.tasks.base import Batch, NetworkTask


class Survival(NetworkTask):
    """Survival: predicts the logarithm of a sample's risk; the loss is a mean of Cox's over the mini-batch.

    The samples of a mini-batch are compared with each other: those without an event count as being at risk alone, and
    a mini-batch without an event has the loss 0. Several models predict the mean of their logarithms of the risk.
    """

    name = "survival"
    target = "survival"
    traits = frozenset({"features"})
    compares_samples = True

    @cached_property
    def measures(self) -> Measures:
        """Returns how predictions are scored."""
        return SurvivalMeasures()

    def learned_of(self, y: np.ndarray) -> np.ndarray:
        """Returns which samples have an event, bool of shape (n,), by their targets."""
        return np.asarray(y[:, 1] > 0)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the mean of :func:`rayfl.metrics.survival.cox_losses` over the samples of the batch."""
        return batch.mean(cox_losses(outputs[:, 0], batch.y, batch.mask))
