"""The task self_supervised: an encoder of images, learned from two views of each and without labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rayfl.data.images.variations import Variations
from rayfl.errors import MethodError
from rayfl.examples import Examples, InputSpec
from rayfl.metrics.representations import RepresentationMeasures, linear_classes, nearest_classes, spread
from rayfl.metrics.views import nt_xent, towards
from rayfl.models.base import Network
from rayfl.tasks.base import Batch, Model, Predictor
from rayfl.tasks.beside_training import Pass, TaskBesideTraining

ObjectiveName = Literal["simsiam", "simclr", "byol"]
_PAIRS = 1 << 22
"""Pairs of views that are compared at a time in an evaluation."""


@dataclass(frozen=True)
class ViewLoss:
    """The loss of two views of each sample.

    Attributes:
        name: ``simsiam``: minus the cosine of what is predicted and the other view's projection, which is a constant
            (Chen and He, CVPR 2021); ``byol``: 2 minus twice the cosine, summed over both views, with projections of a
            target network, or without one of the network itself (Grill et al., NeurIPS 2020); ``simclr``: NT-Xent
            (Chen et al., ICML 2020).
        temperature: of NT-Xent.
    """

    name: ObjectiveName = "simsiam"
    temperature: float = 0.5

    @property
    def predicts(self) -> bool:
        """Returns whether a network has a predictor behind its projector."""
        return self.name != "simclr"

    def projections(self, outputs: Tensor) -> Tensor:
        """Returns the projections among outputs of shape (..., d) or (..., 2 d)."""
        return outputs.chunk(2, -1)[0] if self.predicts else outputs

    def __call__(
        self,
        outputs: Tensor,
        target: Tensor | None = None,
        present: Tensor | None = None,
        rows: slice = slice(None),
    ) -> Tensor:
        """Returns the losses of samples, shape (n,) as far as it is in ``rows``.

        Args:
            outputs: of both views, shape (n, 2, d) or (n, 2, 2 d).
            target: projections of both views by a target network, shape (n, 2, d); None: those of ``outputs``.
            present: 1 for a sample and 0 for padding, shape (n,); None: no padding.
            rows: samples whose losses are returned.
        """
        if not self.predicts:
            return nt_xent(outputs, self.temperature, present, rows)
        projected, predicted = outputs[rows].chunk(2, -1)
        found = towards(predicted, projected if target is None else target[rows])
        return 4 + 4 * found if self.name == "byol" else found


class SelfSupervised(TaskBesideTraining):
    """Learning of an encoder from two views of each image; the loss is the mean of the samples' :class:`ViewLoss`.

    A mini-batch in training is of shape (b, 2, *image shape): both views of each sample. Outputs are projections, shape
    (b, 2, d), or projections and what is predicted of them, shape (b, 2, 2 d). SimCLR's views go through the network
    together, those of SimSiam and BYOL one after the other, as in their authors' code; batch normalization tells the
    difference.

    Labels are for evaluation alone: the features of a client's samples, which are not changed at random, are compared
    with those of its training samples. Several models have their features side by side, so that cosines are means of
    theirs, and the mean of their losses. The task has no classes, and features of two views a sample.

    Args:
        network: from images to features and outputs (:class:`rayfl.models.networks.siamese.SiameseModel`).
        candidates: one task per architecture, if clients may differ in it.
        spec: of the data.
        objective: the loss.
        measures: how samples are scored.
        neighbours: how many training samples vote for a class.
        knn_temperature: of their votes.

    Attributes:
        views: of the samples of an evaluation, for its loss; None: both are the sample as it is.
    """

    name = "self_supervised"
    target = "class"
    inputs_per_sample = 2
    scored_by_predictions = False
    mixes_outputs = False

    def __init__(
        self,
        network: Network,
        candidates: Sequence[SelfSupervised] = (),
        spec: InputSpec | None = None,
        objective: ViewLoss | None = None,
        measures: RepresentationMeasures | None = None,
        neighbours: int = 200,
        knn_temperature: float = 0.1,
    ) -> None:
        super().__init__(network, candidates, spec)
        self.objective = ViewLoss() if objective is None else objective
        self.compares_samples = not self.objective.predicts
        self.views: Variations | None = None
        self._measures = RepresentationMeasures() if measures is None else measures
        self._neighbours, self._temperature = neighbours, knn_temperature
        self._views_on: dict[torch.device, Variations] = {}

    @cached_property
    def measures(self) -> RepresentationMeasures:
        """Returns how samples are scored."""
        return self._measures

    @property
    def by_sample(self) -> None:
        """Returns None: samples are scored beside the client's training samples."""
        return None

    def logits(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """Returns the network's outputs for both views, shape (b, 2, d) or (b, 2, 2 d)."""
        return self.outputs(model, batch.x, batch.mask, training)

    def outputs(self, model: Model, x: Tensor, mask: Tensor | None = None, training: bool = False) -> Tensor:
        """Returns the network's outputs for both views, shape (b, 2, d) or (b, 2, 2 d).

        Args:
            model: the network's tensors.
            x: both views of each image, shape (b, 2, *image shape).
            mask: 1 for samples and 0 for padding, shape (b,); None if all are samples.
            training: whether the network is in training mode.

        Raises:
            MethodError: there is one image a sample.
        """
        if self.spec is not None and x.dim() != len(self.spec.shape) + 2:
            raise MethodError(
                "task=self_supervised learns from two views of each image, which Client.train and Client.gradient make "
                "of a client's own samples; here are images themselves"
            )
        if not self.objective.predicts:
            both = None if mask is None else mask.repeat_interleave(2)
            found = self.network.logits(model, x.flatten(0, 1), training=training, mask=both)
            return found.view(-1, 2, found.shape[-1])
        each = [self.network.logits(model, x[:, view], training=training, mask=mask) for view in (0, 1)]
        return torch.stack(each, 1)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the mean loss of the samples."""
        return batch.mean(self.objective(outputs, present=batch.mask))

    def loss_towards(self, outputs: Tensor, target: Tensor, batch: Batch) -> Tensor:
        """Returns the mean loss of the samples with projections of a target network.

        Args:
            outputs: of the trained network, shape (b, 2, 2 d).
            target: outputs of the target network, of the same shape; no gradient flows through them.
            batch: the samples.
        """
        return batch.mean(self.objective(outputs, self.objective.projections(target), batch.mask))

    def predictions(self, models: Sequence[Model], x: Tensor) -> Tensor:
        """Returns features of length 1, those of several models side by side; shape (b, f)."""
        return self._unit(self.network, models, x)

    def passes(
        self, predictor: Predictor, models: Sequence[Model], examples: Examples, training: Examples
    ) -> Sequence[Pass]:
        """See the base class: features of the samples and of the training samples, and the samples' outputs."""
        if predictor.combine is not None:
            raise MethodError("task=self_supervised compares features of models; a mixture of outputs has none")
        task = predictor.task or self

        def features(samples: Examples, index: Tensor) -> Tensor:
            return self._unit(task.network, models, samples.x[index])

        def outputs(index: Tensor) -> Tensor:
            x = self._viewed(examples.x[index], index)
            return torch.stack([task.outputs(model, x) for model in models], 1)

        count = len(examples), len(training)
        return ((partial(features, examples), count[0]), (partial(features, training), count[1]), (outputs, count[0]))

    def assessed(self, rows: Sequence[Tensor], examples: Examples, training: Examples, own: bool) -> Tensor:
        """See the base class."""
        features, known, outputs = rows
        count, compared = len(examples), len(training) > own
        losses = torch.stack([self._losses(one) for one in outputs.unbind(1)]).mean(0)
        columns = [losses, spread(features).expand(count), losses.new_full((count,), float(compared))]
        if not compared:
            columns += [torch.zeros_like(losses)] * (self.measures.size - 4)
            return self.measures.statistics(torch.stack(columns, 1), examples.y)
        options = self._neighbours, self._temperature, own
        classes = int(training.y.max()) + 1
        columns.append(nearest_classes(features, known, training.y, classes, *options) == examples.y)
        if self.measures.linear:
            columns.append(linear_classes(features, known, training.y) == examples.y)
        return self.measures.statistics(torch.stack([one.double() for one in columns], 1), examples.y)

    def _losses(self, outputs: Tensor) -> Tensor:
        """Returns the samples' losses; those that compare samples for few rows at a time."""
        count = len(outputs)
        width = max(_PAIRS // (4 * count), 1)
        found = [self.objective(outputs, rows=slice(first, first + width)) for first in range(0, count, width)]
        return torch.cat(found)

    def _viewed(self, x: Tensor, index: Tensor) -> Tensor:
        """Returns the views of an evaluation of images with these numbers, shape (b, 2, *image shape)."""
        if self.views is None:
            return torch.stack([x, x], 1)
        if x.device not in self._views_on:
            self._views_on[x.device] = self.views.to(x.device)
        return self._views_on[x.device].of_samples(x, index)

    def _unit(self, network: Any, models: Sequence[Model], x: Tensor) -> Tensor:
        each = [normalize(network.features(model, x), dim=-1) for model in models]
        return each[0] if len(each) == 1 else torch.cat(each, -1) / len(each) ** 0.5
