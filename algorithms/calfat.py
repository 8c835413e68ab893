"""CalFAT: adversarial training on logits to which each client adds how frequent its classes are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.fedavg import FineTuned
from algorithms.fedlc import EXCLUDED
from algorithms.parts.adversarial import Adversarial
from algorithms.parts.prototypes import class_counts
from algorithms.parts.transfer import distillation
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task


class CalFAT(Adversarial, FineTuned):
    """CalFAT (calibrated federated adversarial training): attacks and training see logits with the client's classes.

    With z the logits and n_c the client's training samples of class c, calibrated logits are

        z'(x) = z(x) + (log n_c)_c / s

    A client attacks each mini-batch by steps uphill on how far the calibrated probabilities move,

        x_{i+1} = P( x_i + alpha sign( grad_x KL( softmax z'(x) || softmax z'(x_i) ) ) ),    x_0 = x + 0.001 N(0, I)

    where P cuts each number off at a distance of eps from x, and at the least and the largest value that the client's
    training samples have in its place. On the attacked samples alone it goes down CE(s z'(x_J), y). What tells the
    client's frequent classes from its rare ones is then in log n_c, and not in the model. Predictions are those of z.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. Evaluated: w (``global``), and w on test samples that
    are attacked (``attacked``). With ``finetune_epochs`` each client fine-tunes the final model on samples as they are,
    without calibration.

    References:
        Chen, Liu, Ma, Lyu: CalFAT: Calibrated Federated Adversarial Training with Label Skewness, NeurIPS 2022 (arXiv
        2205.14926); formulas of the authors' code.
    """

    name: Literal["calfat"] = "calfat"
    citation: ClassVar[str] = "Chen et al., NeurIPS 2022"

    start: Literal["sample", "near", "ball"] = setting(
        "near",
        "x_0",
        "where attacks in training begin: at x (not with kl, which has no slope there); near it, at x plus normal "
        "numbers of a deviation of 0.001 in that unit; or at a point drawn evenly from the ball",
        unless={"radius": (0,)},
    )
    attack: Literal["kl", "cross_entropy"] = setting(
        "kl",
        "",
        "what attacks in training go uphill on: KL of calibrated probabilities; or the loss, CE(s z'(x_i), y)",
        unless={"radius": (0,)},
    )
    logit_scale: float = setting(10.0, "s", "factor of the logits in the loss, not in attacks by kl", gt=0)
    absent_count: float = setting(
        1.0, "", "n_c of a class that the client lacks; 0 leaves it out of the softmax", ge=0, le=1
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.radius and self.attack == "kl" and self.start == "sample":
            raise ConfigError(
                "algorithm.start=sample with algorithm.attack=kl: at a sample itself the divergence is least, and has "
                "no slope. Set algorithm.start=near or ball, or algorithm.attack=cross_entropy"
            )

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        network = client.task.network
        counts = class_counts(client.examples().y, network.head_shape[0])
        prior = self.prior(counts).to(model[network.parameter_names[0]])
        frozen = {**self.limits(client), "prior": prior}
        trained = await client.train(model, self.objective, frozen=frozen, draw=self.starts(client))
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    def prior(self, counts: Tensor) -> Tensor:
        """log n_c, shape (C,).

        Args:
            counts: n_c, shape (C,), float64.
        """
        assumed = torch.where(counts > 0, counts, self.absent_count)
        return torch.where(assumed > 0, torch.where(assumed > 0, assumed, 1).log(), -EXCLUDED)

    @property
    def objective(self) -> Sum:
        """CE(s z + log n, y) of attacked samples."""
        return function(self._calibrated)

    def _calibrated(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        value = partial(self._loss, task, frozen["prior"])
        goal = value
        if self.radius and self.attack == "kl":
            at = {name: leaf.detach() for name, leaf in model.items()}
            goal = partial(self._moved, task.logits(at, batch, training=False), frozen["prior"])
        moved = replace(batch, x=self.attacked(model, batch, task, frozen, draw, goal))
        return value(task.logits(model, moved), moved)

    def _loss(self, task: Task, prior: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """CE(s z', y)."""
        return task.loss_of(self.logit_scale * logits + prior, batch)

    def _moved(self, kept: Tensor, prior: Tensor, logits: Tensor, batch: Batch) -> Tensor:
        """KL of calibrated probabilities from those of the logits ``kept``."""
        prior = prior / self.logit_scale
        return distillation(logits + prior, kept + prior, batch, 1.0)
