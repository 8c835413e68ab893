"""Models of the clients' own, of one width of features, that are trained towards prototypes of the classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, setting
from algorithms.parts.architectures import task_of
from algorithms.parts.prototypes import class_counts
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import Sum, function, loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task

FLOOR = math.log(1e-12)
"""Log-probability of a class that cannot be predicted."""


class FeatureModels(Algorithm):
    """Models of the clients' own, whose features of one width they share; the initial ones, and their check."""

    initial: Literal["common", "own"] = setting(
        "common", "", "initial v_k: the initial model of the federated methods, or an own draw per client", kept=True
    )

    def check(self, task: Task, context: RoundContext) -> None:
        widths = [candidate.network.head_shape[1] for candidate in task.candidates]
        if len(set(widths)) > 1:
            raise ConfigError(
                f"{type(self).__name__}'s clients share features, but the last layers of model.candidates read "
                f"{widths} of them: choose models whose last layer has the same number of inputs"
            )
        if self.initial == "own" and len(task.candidates) > 1:
            raise ConfigError("algorithm.initial is own, which model.candidates does not have: set it to common")

    def own(self, client: Client) -> Tree:
        """v_k, the initial model until the client has trained."""
        stored: Tree | None = client.state.get("local")
        if stored is not None:
            return stored
        return client.initial_model(task_of(client)) if self.initial == "common" else client.fresh_model()


class AlignedModels(FeatureModels):
    """What FedProto and FedTGP have in common: a client's own model, its loss, and its predictions.

    Prototypes are a tree: ``means`` c_y of shape (C, d), and ``exist`` of shape (C,), 1 for each that there is.
    """

    alignment_weight: float = setting(1.0, "lambda", "weight of the distance of features to prototypes", ge=0)
    inference: Literal["prototypes", "head"] = setting(
        "prototypes", "", "what is called personalized: the nearest prototype's class (paper), or the own last layer's"
    )
    candidates: Literal["all", "own"] = setting(
        "all", "", "prototypes among which the nearest is sought: all, or those of the classes that the client has"
    )

    @property
    def objective(self) -> Sum:
        """The cross-entropy and lambda times the distance of features to prototypes, from one forward pass."""
        return function(self.aligned)

    @property
    def plain_objective(self) -> Sum:
        """The cross-entropy alone."""
        return loss("model")

    def aligned(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The objective's value; a scalar."""
        features, logits = task.head_inputs_and_logits(trained["model"], batch)
        return self.aligned_loss(features, logits, batch, task, frozen["prototypes"])

    def aligned_loss(self, features: Tensor, logits: Tensor, batch: Batch, task: Task, prototypes: Any) -> Tensor:
        """CE + lambda mean (f(x) - c_y)^2, of features (b, d) and logits (b, C); a scalar.

        Samples of classes without prototype take no part in the second term.
        """
        distances = prototypes["exist"][batch.y] * (features - prototypes["means"][batch.y]).square().mean(-1)
        value: Tensor = task.loss_of(logits, batch) + self.alignment_weight * batch.mean(distances)
        return value

    def rows(self, client: Client, model: Tree, prototypes: Tree) -> dict[str, Predictor]:
        """Both predictions of a model: of the nearest prototype and of its last layer; this one alone without any."""
        task, exist = task_of(client), prototypes["exist"]
        if self.candidates == "own":
            exist = exist * (class_counts(client.examples().y, len(exist)) > 0)
        head = nearest = Predictor.of(model, task=task)
        if exist.any():
            nearest = Predictor.of(
                model, {"means": prototypes["means"], "exist": exist}, combine=nearest_prototype, task=task
            )
        if self.inference == "head":
            return {"personalized": head, "prototypes": nearest}
        return {"personalized": nearest, "head": head}


def nearest_prototype(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Log-probabilities (b, C) of (model, prototypes): log-softmax of -||f - c_y||^2 / d over those that exist."""
    model, prototypes = models
    features = task.network.head_inputs_and_logits(model, x, training=False)[0]
    # not by a matrix product, in which the distances of near features cancel
    apart = torch.cdist(features, prototypes["means"], compute_mode="donot_use_mm_for_euclid_dist").square()
    missing = prototypes["exist"] == 0
    scores = (-apart / features.shape[1]).masked_fill(missing, -math.inf)
    found: Tensor = scores.log_softmax(-1).masked_fill(missing, FLOOR)
    return found
