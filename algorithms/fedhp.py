"""FedHP: bodies of the clients' own, and shared prototypes that stay near directions spread over a sphere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.aligned_models import FeatureModels
from algorithms.parts.architectures import task_of
from algorithms.parts.partial import part
from algorithms.parts.prototypes import class_counts
from algorithms.parts.replaced_heads import body, simplex_etf
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import Sum, function
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait

_RATE, _MOMENTUM = 0.1, 0.9
"""Of the steps that spread the anchors."""


class FedHP(FeatureModels):
    """FedHP (hyperspherical prototypical regularization): clients share one vector a class, and train bodies alone.

    With f(x) in R^d the input of the last linear layer, whose place prototypes p_c take, logits are

        z_c(x) = -||f(x) - p_c||

    Before the first round the server spreads anchors a_c of length 1, by steps down

        mean_c max_{j != c} a_c^T a_j

    with which the prototypes begin. Client k trains the body of its own model v_k and the received prototypes on

        CE(z) + lambda mean_c (1 - cos(p_c, a_c))

    and sends its prototypes p_kc. The server takes their mean over the cohort, of weights q_kc: the share of class c
    among the client's samples. A class of which nobody in the cohort has a sample keeps its prototype.

    Server: a_c, p_c. Client: the body of v_k, which is never sent, and p_kc. Down: a_c and p_c. Up: q_kc p_kc and q_kc.
    Evaluated: the client's body with its own prototypes p_kc (``own``) or with those of all (``shared``); one of them
    is ``personalized`` (``inference``), the other has its own name. A client never sampled has its initial body and the
    prototypes of all. There is no global model.

    Clients may have different architectures (``model.candidates``) of one d: each client's is drawn.

    References:
        Fonio, Polato, Esposito: FedHP: Federated Learning with Hyperspherical Prototypical Regularization, ESANN 2024.
        Mettes, van der Pol, Snoek: Hyperspherical Prototype Networks, NeurIPS 2019, for the anchors.
    """

    name: Literal["fedhp"] = "fedhp"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Fonio et al., ESANN 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "every class has a prototype"}
    client_keeps: ClassVar[str] = "v_k, p_kc"
    server_keeps: ClassVar[str] = "a_c, p_c"
    newcomer: ClassVar[str] = "the prototypes, and a body after a local update"
    mixes_architectures: ClassVar[bool] = True

    anchor_weight: float = setting(0.1, "lambda", "weight of the distance of prototypes to anchors", ge=0)
    prototype_weights: Literal["shares", "samples", "uniform"] = setting(
        "shares",
        "q_kc",
        "weights of the means of prototypes: shares n_kc / n_k of the class among the client's samples, the samples "
        "n_kc, or uniform, where clients without the class count, too",
    )
    prototype_lr: float | None = setting(
        None, "", "learning rate of the prototypes at the clients; null: that of the round", ge=0
    )
    anchors: Literal["spread", "simplex"] = setting(
        "spread",
        "a_c",
        "anchors: spread by steps from random directions, or the vectors of a simplex, which are as far apart as "
        "possible (up to C = d classes)",
        kept=True,
    )
    spread_steps: int = setting(
        1000, "", "steps that spread the anchors; 0: random directions", ge=0, kept=True, only={"anchors": ("spread",)}
    )
    inference: Literal["own", "shared"] = setting(
        "own", "", "prototypes whose nearest is called personalized: the client's own p_kc, or p_c of all"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        classes, width = task.network.head_shape
        if self.anchors == "simplex" and not 2 <= classes <= width:
            raise ConfigError(
                f"algorithm.anchors is simplex, which needs from 2 classes to as many as the last layer has inputs "
                f"({width}), but there are {classes}: set algorithm.anchors=spread"
            )
        for candidate in task.candidates:
            if not set(body(candidate.network)) & set(candidate.network.parameter_names):
                raise ConfigError(
                    "FedHP trains what is before the last layer, and this model trains no layer there: choose a model "
                    "with more layers, or let more of it be trained"
                )

    def init(self, task: Task, context: RoundContext) -> Tree:
        like = next(iter(task.network.initialize(context.streams.integer("init.global")).values()))
        classes, width = task.network.head_shape
        generator = context.streams.generator("init.prototypes")
        if self.anchors == "simplex":
            found = simplex_etf(classes, width, generator)
        else:
            found = spread(torch.from_numpy(generator.standard_normal((classes, width))), self.spread_steps)
        return {"anchors": found.to(like), "prototypes": found.to(like)}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        before = server["prototypes"]
        mean = clients.mean(self.local_update, cohort, broadcast={"anchors": server["anchors"], "prototypes": before})
        known = (mean["weights"] > 0)[:, None]
        return {
            "prototypes": torch.where(known, mean["sums"] / torch.where(known, mean["weights"][:, None], 1), before)
        }

    async def local_update(self, client: Client, anchors: Tensor, prototypes: Tensor) -> Weighted:
        """Trains the client's own body, and the prototypes; returns these by their weights, and the weights."""
        task, model = task_of(client), self.own(client)
        rate = self.prototype_lr
        trained = await client.train(
            {"model": part(model, body(task.network)), "prototypes": prototypes},
            self.objective,
            frozen={"head": part(model, task.network.head_names), "anchors": anchors},
            groups={} if rate is None else {"prototypes": ParameterGroup(lr=rate)},
            task=task,
        )
        client.state["local"], client.state["prototypes"] = {**model, **trained["model"]}, trained["prototypes"]
        client.publish(local=self.nearest(client, trained["prototypes"]))
        weights = self.weights(class_counts(client.examples().y, len(anchors)))
        sums = weights[:, None] * trained["prototypes"]
        return Weighted({"sums": sums.to(anchors), "weights": weights.to(anchors)})

    def weights(self, counts: Tensor) -> Tensor:
        """q_kc, shape (C,), up to a factor that is the same for all clients.

        Args:
            counts: n_kc, shape (C,), float64.
        """
        if self.prototype_weights == "uniform":
            return torch.ones_like(counts)
        return counts if self.prototype_weights == "samples" else counts / counts.sum()

    @property
    def objective(self) -> Sum:
        """The cross-entropy of z, and lambda times the distance of prototypes to anchors."""
        return function(self._anchored)

    def _anchored(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        prototypes, anchors = trained["prototypes"], frozen["anchors"]
        features, _ = task.head_inputs_and_logits({**frozen["head"], **trained["model"]}, batch)
        value: Tensor = task.loss_of(-distances(features, prototypes), batch)
        if not self.anchor_weight:
            return value
        return value + self.anchor_weight * (1 - F.cosine_similarity(prototypes, anchors, dim=-1)).mean()

    def nearest(self, client: Client, prototypes: Tensor) -> Predictor:
        """The prediction of the client's body with prototypes."""
        return Predictor.of(
            self.own(client), {"prototypes": prototypes}, combine=_log_probabilities, task=task_of(client)
        )

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.local_update(client, server["anchors"], server["prototypes"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        shared = self.nearest(client, server["prototypes"])
        own = self.nearest(client, client.state["prototypes"]) if "prototypes" in client.state else shared
        if self.inference == "own":
            return {"personalized": own, "shared": shared}
        return {"personalized": shared, "own": own}

    def update(self, trained: Any, received: Tree, task: Task) -> None:
        """None: clients send no layer."""
        return None


def distances(features: Tensor, prototypes: Tensor) -> Tensor:
    """||f - p_c|| of shape (b, C), for features of shape (b, d) and prototypes of shape (C, d)."""
    found: Tensor = torch.linalg.vector_norm(features[:, None] - prototypes, dim=-1)
    return found


def spread(directions: Tensor, steps: int) -> Tensor:
    """Unit vectors after steps down the mean over them of the largest cosine with another, shape (C, d).

    Args:
        directions: vectors to begin with, shape (C, d); of any lengths above 0.
        steps: how many, of rate 0.1 with momentum 0.9, after each of which all have length 1.
    """
    vectors, classes = F.normalize(directions, dim=-1), len(directions)
    if classes < 2:
        return vectors
    velocity = torch.zeros_like(vectors)
    for _ in range(steps):
        nearest = (vectors @ vectors.T).fill_diagonal_(-2).argmax(1)
        # a pair's cosine moves both
        slope = vectors[nearest].index_add(0, nearest, vectors) / classes
        velocity = _MOMENTUM * velocity + slope
        vectors = F.normalize(vectors - _RATE * velocity, dim=-1)
    return vectors


def _log_probabilities(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Log-probabilities (b, C) of (model, prototypes)."""
    model, head = models
    features, _ = task.network.head_inputs_and_logits(model, x, training=False)
    return (-distances(features, head["prototypes"])).log_softmax(-1)
