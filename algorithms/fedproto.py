"""FedProto: clients share class means of features, and nothing of their models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.accumulators import ACCUMULATOR, adding, check_unclipped
from algorithms.parts.architectures import task_of
from algorithms.parts.prototypes import class_counts, class_means, memberships, renewed
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.tasks import Batch, Model, Predictor, Task, Trait
from rayfl.engine.terms import Sum, function, loss
from rayfl.errors import ConfigError
from rayfl.params import Tree

FLOOR = math.log(1e-12)
"""Log-probability of a class that cannot be predicted."""


class FedProto(Algorithm):
    """FedProto: every client trains a model of its own, and the clients share their mean features by class.

    With f(x) in R^d the input of the last linear layer, and c_y the prototype of class y that the server sends, client
    k trains its own model v_k on

        CE + lambda mean (f(x) - c_y)^2

    with the mean over batch and features; samples of classes without prototype take no part in the second term. It
    sends its mean features mu_ky by class. The server takes their mean over the clients that have the class; a class
    that nobody had keeps its prototype.

    Server: prototypes c_y. Client: v_k; never sent. Down: c_y with a mark of those that exist. Up: mu_ky with marks.
    Evaluated: v_k with the class of the nearest prototype, argmin_y ||f(x) - c_y||^2, and by its own last layer; one
    of them is ``personalized`` (``inference``), the other has its own name (``head``, ``prototypes``). While there is
    no prototype both are the last layer. A client never sampled has its initial model. There is no global model.

    Clients may have different architectures (``model.candidates``) of one d: each client's is drawn.

    References:
        Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous Clients,
        AAAI 2022, Algorithm 1 and its objective, and nearest-prototype inference.
    """

    name: Literal["fedproto"] = "fedproto"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Tan et al., AAAI 2022"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "prototypes are mean features by class"}
    client_keeps: ClassVar[str] = "v_k"
    server_keeps: ClassVar[str] = "c_y"
    newcomer: ClassVar[str] = "the prototypes, and a model after a local update"
    mixes_architectures: ClassVar[bool] = True

    alignment_weight: float = setting(1.0, "lambda", "weight of the distance of features to prototypes", ge=0)
    inference: Literal["prototypes", "head"] = setting(
        "prototypes", "", "what is called personalized: the nearest prototype's class (paper), or the own last layer's"
    )
    candidates: Literal["all", "own"] = setting(
        "all", "", "prototypes among which the nearest is sought: all, or those of the classes that the client has"
    )
    prototypes_at: Literal["after", "during"] = setting(
        "after",
        "",
        "mean features are those of the trained model in evaluation mode, or of all mini-batches while training, each "
        "before its own step (public codes)",
    )
    prototype_weights: Literal["uniform", "samples"] = setting(
        "uniform", "", "weights of the mean over the clients that have a class: equal, or their samples of it"
    )
    forget_absent: bool = setting(False, "", "drop the prototypes of classes that nobody in the cohort has")
    initial: Literal["common", "own"] = setting(
        "common", "", "initial v_k: the initial model of the federated methods, or an own draw per client", kept=True
    )

    def check(self, task: Task, context: RoundContext) -> None:
        widths = [candidate.network.head_shape[1] for candidate in task.candidates]
        if len(set(widths)) > 1:
            raise ConfigError(
                f"FedProto's clients share features, but the last layers of model.candidates read {widths} of them: "
                "choose models whose last layer has the same number of inputs"
            )
        if self.initial == "own" and len(task.candidates) > 1:
            raise ConfigError("algorithm.initial is own, which model.candidates does not have: set it to common")
        if self.prototypes_at == "during":
            check_unclipped("FedProto", "algorithm.prototypes_at=during", context)

    def init(self, task: Task, context: RoundContext) -> Tree:
        like = next(iter(task.network.initialize(context.streams.integer("init.global")).values()))
        shape = task.network.head_shape
        return {"prototypes": {"means": like.new_zeros(shape), "exist": like.new_zeros(shape[0])}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        prototypes = server["prototypes"]
        mean = clients.mean(self.local_update, cohort, broadcast={"prototypes": prototypes})
        if self.forget_absent:
            prototypes = {name: torch.zeros_like(leaf) for name, leaf in prototypes.items()}
        return {"prototypes": renewed(prototypes, mean["sums"], mean["counts"])}

    async def local_update(self, client: Client, prototypes: Tree) -> Weighted:
        """Trains the client's own model, and sends its mean features by class."""
        task, means = task_of(client), prototypes["means"]
        collected: Tree = {}
        if self.prototypes_at == "during":
            collected = {"sums": torch.zeros_like(means), "counts": torch.zeros_like(means[:, 0])}
        pulled = self.alignment_weight > 0 and bool(prototypes["exist"].any())
        trained = await client.train(
            {"model": self._own(client), **collected},
            self.objective if pulled or self.prototypes_at == "during" else self.plain_objective,
            frozen={"prototypes": prototypes},
            groups=dict.fromkeys(collected, ACCUMULATOR),
            task=task,
        )
        model = client.state["local"] = trained["model"]
        client.publish(**self._rows(client, model, prototypes))
        if self.prototypes_at == "during":
            sums, counts = trained["sums"].double(), trained["counts"].double()
            own = sums / counts.clamp(min=1)[:, None]
        else:
            features = await client.outputs(lambda x, t: t.network.head_inputs_and_logits(model, x)[0], task=task)
            counts, own = class_means(features, client.examples().y, len(means))
        shares = counts if self.prototype_weights == "samples" else (counts > 0).double()
        return Weighted({"sums": (shares[:, None] * own).to(means), "counts": shares.to(means)})

    @property
    def plain_objective(self) -> Sum:
        """The cross-entropy alone."""
        return loss("model")

    @property
    def objective(self) -> Sum:
        """CE + lambda mean (f(x) - c_y)^2, from one forward pass; collects features by class if that is asked for."""
        return function(self._aligned)

    def _aligned(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        prototypes = frozen["prototypes"]
        features, logits = task.head_inputs_and_logits(trained["model"], batch)
        distances = prototypes["exist"][batch.y] * (features - prototypes["means"][batch.y]).square().mean(-1)
        value = task.loss_of(logits, batch) + self.alignment_weight * batch.mean(distances)
        if self.prototypes_at == "during":
            members = memberships(batch, prototypes["exist"])
            value = value + adding(trained["sums"], members.T @ features) + adding(trained["counts"], members.sum(0))
        return value

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.local_update(client, server["prototypes"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return self._rows(client, self._own(client), server["prototypes"])

    def _rows(self, client: Client, model: Tree, prototypes: Tree) -> dict[str, Predictor]:
        """Both predictions of a model."""
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

    def _own(self, client: Client) -> Tree:
        """v_k, the initial model until the client has trained."""
        stored: Tree | None = client.state.get("local")
        if stored is not None:
            return stored
        return client.initial_model(task_of(client)) if self.initial == "common" else client.fresh_model()


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
