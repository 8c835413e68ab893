"""The task of a classifier: cross-entropy of logits, and probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.examples import InputSpec
from rayfl.metrics import CLASSIFICATION, Measures
from rayfl.models.base import Network
from rayfl.tasks.base import Batch, Model, NetworkTask
from rayfl.tasks.chain import Layer


class Classification(NetworkTask):
    """Classification with cross-entropy; predictions are log-probabilities.

    Args:
        network: the stateless network whose tree is trained.
        candidates: one task per architecture, if clients may differ in it.
        spec: of the data.
        measures: how predictions are scored.
    """

    name = "classification"
    target = "class"
    traits = frozenset({"classes", "distribution", "features"})

    def __init__(
        self,
        network: Network,
        candidates: Sequence[Classification] = (),
        spec: InputSpec | None = None,
        measures: Measures = CLASSIFICATION,
    ) -> None:
        super().__init__(network, candidates, spec)
        self._measures = measures

    @property
    def measures(self) -> Measures:
        """Returns how predictions are scored."""
        return self._measures

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy of given logits."""
        return self.cross_entropy(outputs, batch)

    def chain(self, model: Model) -> list[Layer] | None:
        """Returns the linear layers if the model is an MLP and :meth:`loss` its plain cross-entropy; None otherwise.

        Raises:
            ModelError: ``model`` is not of this network.
        """
        kept = all(getattr(type(self), name) is getattr(Classification, name) for name in _OF_THE_LOSS)
        return self.network.chain(model) if kept else None

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy of given logits; a scalar."""
        if batch.mask is None:
            return F.cross_entropy(logits, batch.y)
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))

    def predicted(self, outputs: Tensor) -> Tensor:
        """Returns log-probabilities."""
        return outputs.log_softmax(-1)

    def mixed(self, predictions: Sequence[Tensor]) -> Tensor:
        """Returns the logarithm of the models' mean probabilities."""
        return torch.logsumexp(torch.stack(list(predictions)), 0) - math.log(len(predictions))

    def predictions(self, models: Sequence[Model], x: Tensor) -> Tensor:
        """Returns the log of the mean probabilities, shape (b, C), in evaluation mode."""
        return self.log_probabilities(models, x)

    def log_probabilities(self, models: Sequence[Model], x: Tensor) -> Tensor:
        """Log-probabilities of shape (b, C), in evaluation mode; the mean probability of several models."""
        return super().predictions(models, x)

    def stacked_predictions(self, models: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Returns the predictions of stacked models; for MLPs by batched matrix products instead of ``vmap``."""
        plain = all(getattr(type(self), name) is getattr(Classification, name) for name in _OF_PREDICTIONS)
        layers = self.chain(models) if plain else None
        if layers is None:
            return super().stacked_predictions(models, x)
        read = x.flatten(2)
        for place, (weight, bias) in enumerate(layers):
            read = torch.bmm(read, weight.mT) if bias is None else torch.baddbmm(bias[:, None], read, weight.mT)
            if place < len(layers) - 1:
                read = read.relu_()
        return read.log_softmax(-1)


_OF_THE_LOSS = ("loss", "loss_of", "logits", "cross_entropy")
"""What the written-out gradient supposes."""
_OF_PREDICTIONS = ("predictions", "log_probabilities", "predicted", "score_of")
"""What the written-out predictions suppose."""
