"""Tasks other than classification: several labels, numbers, the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfl.engine.tasks import Batch, NetworkTask
from rayfl.examples import InputSpec
from rayfl.metrics import Measures
from rayfl.metrics.language import IGNORED, LanguageMeasures
from rayfl.metrics.multilabel import MultilabelMeasures
from rayfl.metrics.regression import RegressionMeasures
from rayfl.models.base import Network

Error = Literal["squared", "absolute", "huber"]


@dataclass(frozen=True)
class ErrorLoss:
    """The loss of a number that is predicted.

    Attributes:
        kind: ``squared``: (p - y)^2; ``absolute``: |p - y|; ``huber``: (p - y)^2 / 2 up to ``delta``, beyond it
            delta (|p - y| - delta / 2) (Huber, 1964).
        delta: of ``huber``.
    """

    kind: Error = "squared"
    delta: float = 1.0

    def __call__(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """By sample and output, of the shape of both."""
        if self.kind == "squared":
            return F.mse_loss(predictions, targets, reduction="none")
        if self.kind == "absolute":
            return F.l1_loss(predictions, targets, reduction="none")
        return F.huber_loss(predictions, targets, reduction="none", delta=self.delta)


class Regression(NetworkTask):
    """Numbers are predicted; the loss is a mean over samples and outputs.

    Args:
        network: its outputs are the predictions.
        candidates: one task per architecture, if clients may differ in it.
        spec: says how many numbers there are.
        error: the loss of one.
    """

    name = "regression"
    target = "values"
    traits = frozenset({"features"})

    def __init__(
        self,
        network: Network,
        candidates: Sequence[Regression] = (),
        spec: InputSpec | None = None,
        error: ErrorLoss | None = None,
    ) -> None:
        super().__init__(network, candidates, spec)
        self._error = ErrorLoss() if error is None else error

    @cached_property
    def measures(self) -> Measures:
        """Returns how predictions are scored."""
        return RegressionMeasures(_outputs(self), self._error)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """See the base class."""
        return batch.mean(self._error(outputs, batch.y).mean(-1))


class Multilabel(NetworkTask):
    """Each label is predicted by itself: binary cross-entropy, a mean over samples and labels.

    Predictions are logits. Several models predict the logit of their mean probability.

    Args:
        network: its outputs are the labels' logits.
        candidates: one task per architecture, if clients may differ in it.
        spec: says how many labels there are.
        positive_weight: by label, of the loss where a sample has it; None: 1.
        thresholds: at how many probabilities average precision counts.
    """

    name = "multilabel"
    target = "labels"
    traits = frozenset({"features"})

    def __init__(
        self,
        network: Network,
        candidates: Sequence[Multilabel] = (),
        spec: InputSpec | None = None,
        positive_weight: tuple[float, ...] | None = None,
        thresholds: int = 101,
    ) -> None:
        super().__init__(network, candidates, spec)
        self._positive_weight, self._thresholds = positive_weight, thresholds

    @cached_property
    def measures(self) -> Measures:
        """Returns how predictions are scored."""
        return MultilabelMeasures(_outputs(self), self._thresholds, self._positive_weight)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """See the base class."""
        weight = None if self._positive_weight is None else outputs.new_tensor(self._positive_weight)
        losses = F.binary_cross_entropy_with_logits(outputs, batch.y, pos_weight=weight, reduction="none")
        return batch.mean(losses.mean(-1))

    def mixed(self, predictions: Sequence[Tensor]) -> Tensor:
        """See the base class."""
        stacked = torch.stack(list(predictions))
        return F.logsigmoid(stacked).logsumexp(0) - F.logsigmoid(-stacked).logsumexp(0)


class LanguageModel(NetworkTask):
    """The next token is predicted at every position: cross-entropy, a mean over the positions that count.

    The network's outputs are of shape (b, T, V); predictions are log-probabilities.
    """

    name = "language_model"
    target = "tokens"

    @cached_property
    def measures(self) -> Measures:
        """Returns how predictions are scored."""
        return LanguageMeasures()

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """See the base class; 0 for a batch in which no position counts."""
        losses = F.cross_entropy(outputs.flatten(0, 1), batch.y.flatten(), ignore_index=IGNORED, reduction="none")
        counts = (batch.y != IGNORED).to(outputs.dtype)
        if batch.mask is not None:
            counts = counts * batch.mask[:, None]
        return (losses.view_as(counts) * counts).sum() / counts.sum().clamp(min=1)

    def predicted(self, outputs: Tensor) -> Tensor:
        """See the base class."""
        return outputs.log_softmax(-1)

    def mixed(self, predictions: Sequence[Tensor]) -> Tensor:
        """The logarithm of the mean probability."""
        return torch.stack(list(predictions)).logsumexp(0) - torch.tensor(float(len(predictions))).log()


def _outputs(task: NetworkTask) -> int:
    return task.network.head_shape[0] if task.spec is None else task.spec.num_classes
