"""The task recommendation: which item a user chooses, among items that the user has not chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.metrics import Measures, Metric
from rayfl.metrics.ranking import Pairing, RankingLoss, RankingMeasures, metrics_at
from rayfl.models.base import Network
from rayfl.tasks.base import Batch, Model, NetworkTask
from rayfl.tasks.section import TaskSection


class Recommendation(NetworkTask):
    """Recommendation from implicit feedback: scores items; the chosen one, which is the first of a row, shall win.

    The network's outputs are of shape (b, 1 + n, 1), a score for each item of a row; predictions are of shape
    (b, 1 + n). A pass in training mode reads the chosen item and ``negatives`` of the others of each row, drawn with
    repetition by the key of the step, so that every epoch has others. All passes of a step read the same items. A pass
    in evaluation mode reads all items. Several models predict the mean of their scores.

    Args:
        network: scores each item of a row.
        candidates: one task per architecture, if clients may differ in it.
        spec: of the data.
        error: the loss of a row of scores.
        negatives: how many of the n others a training step reads of each row; all n, if it is as many.
        k: length of the list that metrics look at.
    """

    name = "recommendation"
    target = "ranking"

    def __init__(
        self,
        network: Network,
        candidates: Sequence[Recommendation] = (),
        spec: InputSpec | None = None,
        error: RankingLoss | None = None,
        negatives: int = 4,
        k: int = 10,
    ) -> None:
        super().__init__(network, candidates, spec)
        self._error = RankingLoss() if error is None else error
        self._negatives, self._k = negatives, k
        if spec is None or negatives < spec.shape[0] - 1:
            network.stochastic = True  # its steps need keys

    @cached_property
    def measures(self) -> Measures:
        """Returns how predictions are scored."""
        return RankingMeasures(self._error, self._k)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the mean over samples of :class:`RankingLoss`."""
        return batch.mean(self._error(outputs[..., 0]))

    def predicted(self, outputs: Tensor) -> Tensor:
        """Returns the scores."""
        return outputs[..., 0]

    def logits(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """See the base class; outputs of shape (b, items, 1)."""
        return super().logits(model, self._drawn(batch, training), training)

    def features_and_logits(self, model: Model, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]:
        """See the base class; features of shape (b, items, f), outputs of shape (b, items, 1)."""
        return super().features_and_logits(model, self._drawn(batch, training), training)

    def head_inputs_and_logits(self, model: Model, batch: Batch, training: bool = True) -> tuple[Tensor, Tensor]:
        """See the base class; inputs of shape (b, items, f), outputs of shape (b, items, 1)."""
        return super().head_inputs_and_logits(model, self._drawn(batch, training), training)

    def features(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """See the base class; features of shape (b, items, f)."""
        return super().features(model, self._drawn(batch, training), training)

    def _drawn(self, batch: Batch, training: bool) -> Batch:
        """The mini-batch with the items that a pass reads."""
        x, others = batch.x, batch.x.shape[-1] - 1
        if not training or self._negatives >= others:
            return batch
        places = 1 + self.network.places(x.shape[0], self._negatives, others, x.device)
        return replace(batch, x=torch.cat([x[:, :1], x.gather(1, places)], 1))


class RecommendationSection(TaskSection):
    """Recommendation from implicit feedback, an item that a user chose among others: hit rate and NDCG."""

    learns_from = "ranking"

    name: Literal["recommendation"] = Field("recommendation", description="What is learned.")
    loss: Pairing = Field(
        "bce", description="Of a chosen item and the drawn others: bce, each by itself, or bpr, in pairs."
    )
    negatives: int = Field(
        4,
        ge=1,
        description="Items that the user did not choose, drawn for each chosen one in each training step; at most "
        "dataset.negatives.",
    )
    k: int = Field(10, ge=1, description="Length of the list of recommended items that HR and NDCG look at.")

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class."""
        return metrics_at(self.k)

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        others = spec.shape[0] - 1
        for option, value in (("negatives", self.negatives), ("k", self.k)):
            if value > others:
                raise ConfigError(
                    f"task.{option} is {value}, but each sample has {others} items that the user did not choose: set "
                    f"it to {others} at most, or raise dataset.negatives"
                )
        error = RankingLoss(self.loss)
        return lambda network, candidates: Recommendation(network, candidates, spec, error, self.negatives, self.k)
