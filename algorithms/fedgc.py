"""FedGC: class embeddings of the clients' own, which the server pushes away from the classes of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, check_head, setting
from algorithms.parts.aligned_models import FLOOR
from algorithms.parts.partial import PartialModel, part, shared_part
from algorithms.parts.prototypes import class_counts
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedGC(PartialModel):
    """FedGC (gradient correction): a shared body, and heads of the classes that a client has, corrected by the server.

    With y in C_k the classes that client k has, and w_ky the row of its head for class y (a class embedding), client k
    joins the received body G with its head P_k and minimises the cross-entropy of a softmax over C_k alone, over both.
    The server takes the mean of the G_k. In such a softmax no sample pushes the embeddings of other clients' classes
    away. The server makes up for that: it takes one step

        w_ky <- w_ky - lambda eta d Reg / d w_ky
        Reg = sum_k sum_{y in C_k} -log[ e^(m_y . m_y) / (e^(m_y . m_y) + Z_y) ]
        Z_y = sum_{j: y not in C_j} sum_{c in C_j} e^(w_jc . m_y)

    on the embeddings of all clients that have ever taken part, with m_y the mean of w_ky over those that have class y,
    held fixed: it stands for the features of the class. With classes that are each of one client, m_y = w_ky.

    Server: body G, the weights of all P_k and C_k. Client: the head P_k, at first that of the common initial model, of
    which the server has the newer weight; a bias, if there is one, is never sent. Down: G, and the client's w_ky. Up:
    G_k, n_k, w_ky with marks of C_k. Evaluated: G with the client's head, among its own classes (``personalized``). A
    client never sampled has the initial head. There is no global model. With lambda = 0 the clients' heads are their
    own, as in FedPer, but for the softmax.

    References:
        Niu, Deng: Federated Learning for Face Recognition with Gradient Correction, AAAI 2022.
    """

    name: Literal["fedgc"] = "fedgc"
    citation: ClassVar[str] = "Niu and Deng, AAAI 2022"
    no_privacy: ClassVar[str] = "the server reads the classes and class embeddings of each client"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "clients learn the classes that they have"}
    client_keeps: ClassVar[str] = "P_k"
    server_keeps: ClassVar[str] = "G, w_ky, C_k"

    head_group: Literal["last_layer"] = setting("last_layer", "", "the head: the last linear layer")
    correction_weight: float = setting(
        1.0, "lambda", "factor of the round's learning rate in the server's step; 0: no correction", ge=0
    )

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("FedGC", task.network)
        if not set(self.body(task.network)) & set(task.network.parameter_names):
            raise ConfigError("FedGC shares a body, but the model trains no layer before the last: choose a deeper one")

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = task.network.initialize(context.streams.integer("init.global"))
        weight = model[task.network.head_weight]
        return {
            "shared": part(model, self.body(task.network)),
            "embeddings": {str(client): weight for client in range(context.num_clients)},
            "exist": weight.new_zeros(context.num_clients, len(weight)),
        }

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        shared, embeddings = shared_part(server), dict(server["embeddings"])
        own = {client: {"weight": embeddings[str(client)]} for client in cohort}
        rest = self.remainder(shared, cohort, clients)
        mean = clients.mean(self.restricted_update, cohort, {"shared": shared}, own, also=rest)
        exist = server["exist"].clone()
        for client, reply in clients.map(self.embedded, cohort, {}).items():
            embeddings[str(client)], exist[client] = reply["weight"], reply["exist"]
        if self.correction_weight:
            context = clients.context
            rate = self.correction_weight * context.train.lr_in(context.round)
            stacked = torch.stack(list(embeddings.values()))
            moved = corrected(stacked, exist > 0, rate)
            embeddings = {client: row.clone() for client, row in zip(embeddings, moved, strict=True)}
        return {"shared": mean, "embeddings": embeddings, "exist": exist}

    async def restricted_update(self, client: Client, shared: Tree, weight: Tensor) -> Weighted:
        """Trains the received body with the client's head, whose weight comes from the server; returns the body."""
        network = client.task.network
        trained = await self.train_model(client, self.completed(client, shared, weight))
        client.state["personal"] = part(trained, network.head_names)
        client.publish(local=self.restricted(client, trained))
        return self.weighted(client, part(trained, self.body(network)))

    async def embedded(self, client: Client) -> Tree:
        """Returns the class embeddings of the client's head as trained, and marks of the classes that it has."""
        weight = client.state["personal"][client.task.network.head_weight]
        return {"weight": weight.clone(), "exist": own_classes(client, weight)}

    async def train_model(self, client: Client, model: Tree) -> Tree:
        weight = model[client.task.network.head_weight]
        return await client.train(model, self.objective, frozen={"exist": own_classes(client, weight)})

    @property
    def objective(self) -> Sum:
        """The cross-entropy of the softmax over the classes that the client has."""
        return function(self._among_own)

    def _among_own(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        logits = task.logits({**frozen.get("model", {}), **trained}, batch)
        # finite, for padding may have any class
        least = torch.finfo(logits.dtype).min / 2
        return task.loss_of(logits.masked_fill(frozen["exist"] == 0, least), batch)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Fits a head to the body, from the initial one, over the classes that the newcomer has."""
        network = client.task.network
        model = self.assembled(client, shared_part(server))
        marks = own_classes(client, model[network.head_weight])
        client.state["personal"] = await self.train_part(
            client, model, network.head_names, stream=".join", objective=self.objective, reads={"exist": marks}
        )
        return {}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """G, and each client's own class embeddings."""
        return {"shared": server["shared"]}, {int(k): {"weight": row} for k, row in server["embeddings"].items()}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = self.completed(client, shared_part(server), server.get("weight"))
        return {"personalized": self.restricted(client, model)}

    def completed(self, client: Client, shared: Model, weight: Tensor | None) -> Tree:
        """The whole model of a body and the client's head, with the server's weight of it if there is one."""
        model = self.assembled(client, shared)
        return model if weight is None else {**model, client.task.network.head_weight: weight}

    def restricted(self, client: Client, model: Tree) -> Predictor:
        """A model's prediction among the classes that the client has."""
        marks = own_classes(client, model[client.task.network.head_weight])
        return Predictor.of(model, {"exist": marks}, combine=among_own)


def own_classes(client: Client, weight: Tensor) -> Tensor:
    """C_k: 1 for each class of which the client has training samples, else 0; shape (C,).

    Args:
        client: the client.
        weight: of the last layer, shape (C, d), whose type the marks get.
    """
    return (class_counts(client.examples().y, len(weight)) > 0).to(weight)


def among_own(models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Log-probabilities (b, C) of (model, marks): log-softmax of the logits of the marked classes."""
    model, marks = models
    missing = marks["exist"] == 0
    logits = task.network.logits(model, x, training=False).masked_fill(missing, -math.inf)
    found: Tensor = logits.log_softmax(-1).masked_fill(missing, FLOOR)
    return found


def corrected(embeddings: Tensor, exist: Tensor, rate: float) -> Tensor:
    """Class embeddings after one step down Reg.

    Args:
        embeddings: w_ky, shape (K, C, d), left as they are.
        exist: y in C_k, bool, shape (K, C); other embeddings neither count nor move.
        rate: lambda eta.
    """
    counts, slopes = exist.sum(0), torch.zeros_like(embeddings)
    for label in counts.nonzero()[:, 0].tolist():
        owners = exist[:, label]
        mean = embeddings[owners, label].mean(0)
        others = exist & ~owners[:, None]
        scores = embeddings[others] @ mean
        # of Reg the numerator, too, holds m_y fixed: the slope of each term is m_y times a share of the denominator
        shares = torch.cat([(mean @ mean)[None], scores]).softmax(0)[1:]
        slopes[others] += counts[label] * shares[:, None] * mean
    return embeddings - rate * slopes
