"""Tasks other than classification: several labels, numbers, the next token, a class of each pixel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from rayfl.examples import InputSpec
from rayfl.metrics import Measures
from rayfl.metrics.language import IGNORED, LanguageMeasures
from rayfl.metrics.multilabel import MultilabelMeasures
from rayfl.metrics.regression import RegressionMeasures
from rayfl.metrics.segmentation import SegmentationMeasures, SoftMaskLoss
from rayfl.models.base import Network
from rayfl.tasks.base import Batch, Model, NetworkTask, Predictor

Error = Literal["squared", "absolute", "huber"]


@dataclass(frozen=True)
class ErrorLoss:
    """The loss of a predicted number.

    Attributes:
        kind: ``squared``: (p - y)^2; ``absolute``: |p - y|; ``huber``: (p - y)^2 / 2 up to ``delta``, beyond it
            delta (|p - y| - delta / 2) (Huber, 1964).
        delta: of ``huber``.
    """

    kind: Error = "squared"
    delta: float = 1.0

    def __call__(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of each sample and output, in the shape of the targets."""
        if self.kind == "squared":
            return F.mse_loss(predictions, targets, reduction="none")
        if self.kind == "absolute":
            return F.l1_loss(predictions, targets, reduction="none")
        return F.huber_loss(predictions, targets, reduction="none", delta=self.delta)


class Regression(NetworkTask):
    """Regression: predicts numbers; the loss is a mean over samples and outputs.

    Args:
        network: its outputs are the predictions.
        candidates: one task per architecture, if clients may differ in it.
        spec: of the data; gives the number of outputs.
        error: the loss of one number.
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
        """Returns the mean :class:`ErrorLoss` over samples and outputs."""
        return batch.mean(self._error(outputs, batch.y).mean(-1))


class Multilabel(NetworkTask):
    """Multilabel classification: binary cross-entropy, a mean over samples and labels.

    Predictions are logits. Several models predict the logit of their mean probability.

    Args:
        network: its outputs are the labels' logits.
        candidates: one task per architecture, if clients may differ in it.
        spec: of the data; gives the number of labels.
        positive_weight: by label, the weight of the loss for samples that have the label; None: 1.
        thresholds: number of probability thresholds for average precision.
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
        """Returns the mean binary cross-entropy over samples and labels."""
        weight = None
        if self._positive_weight is not None:
            # Filled in place: a vector that is brought from the host would have the host wait in each step.
            weight = torch.stack([outputs.new_full((), one) for one in self._positive_weight])
        losses = F.binary_cross_entropy_with_logits(outputs, batch.y, pos_weight=weight, reduction="none")
        return batch.mean(losses.mean(-1))

    def mixed(self, predictions: Sequence[Tensor]) -> Tensor:
        """Returns the logits of the mean probabilities."""
        stacked = torch.stack(list(predictions))
        return F.logsigmoid(stacked).logsumexp(0) - F.logsigmoid(-stacked).logsumexp(0)


class Segmentation(NetworkTask):
    """Segmentation: a class for each pixel or voxel; the loss is a mean over samples.

    The network's outputs are of shape (b, H, W, C) or (b, H, W, D, C); predictions are log-probabilities. Several
    models predict the logarithm of their mean probability.

    Args:
        network: its outputs are the classes' logits at each pixel.
        candidates: one task per architecture, if clients may differ in it.
        spec: of the data; gives the number of classes.
        error: the loss of a sample.
        background: whether overlap metrics (Dice, IoU) include class 0.
    """

    name = "segmentation"
    target = "mask"

    def __init__(
        self,
        network: Network,
        candidates: Sequence[Segmentation] = (),
        spec: InputSpec | None = None,
        error: SoftMaskLoss | None = None,
        background: bool = True,
    ) -> None:
        super().__init__(network, candidates, spec)
        self._background = background
        self._error = SoftMaskLoss(background=background) if error is None else error

    @cached_property
    def measures(self) -> Measures:
        """Returns how predictions are scored."""
        return SegmentationMeasures(_outputs(self), self._error, self._background)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the mean of the samples' losses."""
        return batch.mean(self._error(outputs.log_softmax(-1), batch.y))

    def predicted(self, outputs: Tensor) -> Tensor:
        """Returns log-probabilities."""
        return outputs.log_softmax(-1)

    def mixed(self, predictions: Sequence[Tensor]) -> Tensor:
        """Returns the logarithm of the mean probability."""
        return _log_of_mean(predictions)


class LanguageModel(NetworkTask):
    """Language modelling: predicts the next token; the loss is the mean cross-entropy over the positions with a target.

    The network's outputs are of shape (b, T, V); predictions are log-probabilities. A network with ``output_rows``
    computes them for at most that many positions at a time, in training and evaluation, unless a method asks for all.
    """

    name = "language_model"
    target = "tokens"

    @cached_property
    def measures(self) -> LanguageMeasures:
        """Returns how predictions are scored."""
        return LanguageMeasures()

    def loss(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """Returns the mean cross-entropy over the positions with a target."""
        if not self._plain(_OF_THE_LOSS):
            return super().loss(model, batch, training)
        losses = self.network.token_losses(model, batch.x, batch.y, training=training, mask=batch.mask)
        return _mean_over_tokens(losses, batch)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy of given outputs; 0 for a batch without targets."""
        losses = F.cross_entropy(outputs.flatten(0, 1), batch.y.flatten(), ignore_index=IGNORED, reduction="none")
        return _mean_over_tokens(losses.view_as(batch.y), batch)

    def predicted(self, outputs: Tensor) -> Tensor:
        """Returns log-probabilities."""
        return outputs.log_softmax(-1)

    def mixed(self, predictions: Sequence[Tensor]) -> Tensor:
        """Returns the logarithm of the mean probability."""
        return _log_of_mean(predictions)

    def statistics(self, predictor: Predictor, models: Sequence[Model], x: Tensor, y: Tensor) -> Tensor:
        """Returns the sums of the measures; computes few outputs at a time where the network can."""
        task = predictor.task or self
        rows = task.network.output_rows
        if rows is None or not len(y):
            return super().statistics(predictor, models, x, y)
        if predictor.combine is not None or not self._plain(_OF_THE_STATISTICS):
            few = max(rows // y.shape[1], 1)
            parts = [
                super(LanguageModel, self).statistics(predictor, models, *xy)
                for xy in zip(torch.split(x, few), torch.split(y, few), strict=True)
            ]
            return torch.stack(parts).sum(0)
        read = [task.network.features(model, x) for model in models]
        return self.measures.added(self._found(task, models, read, y))

    @property
    def by_sample(self) -> LanguageMeasures | None:
        """Returns the measures, unless a subclass scores in its own way."""
        return self.measures if self._plain((*_OF_THE_STATISTICS, "statistics")) else None

    def outcomes(self, models: Model, x: Tensor, y: Tensor, stacked: bool) -> tuple[Tensor, ...]:
        """Returns the measures' summands by text; computes few outputs at a time where the network can."""
        if self.network.output_rows is None:
            return super().outcomes(models, x, y, stacked)
        if not stacked:
            return self._found(self, [models], [self.network.features(models, x)], y)
        read = vmap(lambda model, tokens: self.network.features(model, tokens))(dict(models), x)
        # The output layer belongs to the base, so that of one model serves all.
        one = {name: leaf[0] for name, leaf in models.items()}
        return self._found(self, [one], [read.flatten(0, 1)], y.flatten(0, 1))

    def _found(
        self, task: LanguageModel, models: Sequence[Model], features: Sequence[Tensor], y: Tensor
    ) -> tuple[Tensor, ...]:
        """Returns the measures' summands for an ensemble's predictions, computed for a few positions at a time.

        Args:
            task: the models' task.
            models: their output layers map features to outputs.
            features: by model, shape (n, T, f).
            y: targets, shape (n, T).
        """
        rows, targets = task.network.output_rows, y.flatten()
        assert rows is not None
        flat = [read.flatten(0, 1) for read in features]
        chosen, hits = flat[0].new_zeros(len(targets)), torch.zeros_like(targets, dtype=torch.bool)
        for here in torch.split((targets != IGNORED).nonzero()[:, 0], rows):
            members = [
                task.predicted(task.network.classify(model, read[here]))
                for model, read in zip(models, flat, strict=True)
            ]
            predicted = members[0] if len(members) == 1 else task.mixed(members)
            chosen[here] = predicted.gather(1, targets[here, None])[:, 0]
            hits[here] = predicted.argmax(1) == targets[here]
        return self.measures.of_tokens(chosen.view_as(y), hits.view_as(y), y)

    def asked(self, y: Tensor) -> Tensor:
        """Returns the positions with a target."""
        return y != IGNORED

    def _plain(self, names: Sequence[str]) -> bool:
        """Returns whether some methods are not overridden by a subclass."""
        return all(getattr(type(self), name) is getattr(LanguageModel, name) for name in names)


_OF_THE_LOSS = ("logits", "loss_of")
_OF_THE_STATISTICS = ("predictions", "predicted", "mixed", "score_of", "logits", "measures")
"""What the ways around a whole batch's outputs suppose."""


def _mean_over_tokens(losses: Tensor, batch: Batch) -> Tensor:
    """Returns the mean of losses (b, T) over the positions with a target; 0 if there is none."""
    counts = (batch.y != IGNORED).to(losses.dtype)
    if batch.mask is not None:
        counts = counts * batch.mask[:, None]
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def _log_of_mean(predictions: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(predictions)).logsumexp(0) - torch.tensor(float(len(predictions))).log()


def _outputs(task: NetworkTask) -> int:
    return task.network.head_shape[0] if task.spec is None else task.spec.num_classes
