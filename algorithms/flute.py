"""FLUTE: a shared body under heads that clients and the server draw towards neural collapse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, check_head, setting
from algorithms.parts.partial import PartialModel
from algorithms.parts.prototypes import class_counts
from algorithms.parts.settings import epochs_without_effect
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import loss
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Task, Trait


def collapse(weight: Tensor, seen: Tensor) -> Tensor:
    """NC(W; u), the distance of a head to neural collapse; a scalar, of slope 0 where it is 0 and where W is 0.

    Args:
        weight: W, shape (C, d).
        seen: u, shape (C,): 1 for each class that the client has, else 0.
    """
    gram = weight @ weight.T
    square = gram.square().sum()
    # a root has no slope at 0
    scaled = gram / torch.where(square > 0, square, 1).sqrt()
    wanted = (torch.diag(seen) - seen[:, None] * seen / len(seen)) / math.sqrt(len(seen) - 1)
    apart = (scaled - wanted).square().sum()
    return torch.where(apart > 0, torch.where(apart > 0, apart, 1).sqrt(), 0)


class FLUTE(PartialModel):
    """FLUTE: the clients share the body, and personal heads are regularised by clients and server.

    With W_k the weight of client k's last linear layer, shape (C, d), u_k in {0, 1}^C the classes that it has, * the
    product entry by entry, and f(x) what the layer reads, a client joins the received body G with its head P_k and
    minimises

        P_k        <- tau_h epochs at G:   CE + lambda_1 NC(W_k; u_k) + lambda_2 ||W_k||^2
        (G_k, P_k) <- tau_b epochs:        the same + lambda_3 mean ||f(x)||^2
        NC(W; u) = ||W W^T / ||W W^T|| - (u u^T) * (I - 1 1^T / C) / sqrt(C - 1)||

    with norms of Frobenius. NC is 0 where the weights of the classes that a client has are the corners of a simplex,
    as in neural collapse. The second pass has an optimizer and batches of its own. The server takes the mean of the
    G_k, and one more step on the heads of the cohort S:

        W_k <- W_k - eta_s grad 1/|S| sum_{j in S} NC(W_j; u_j)

    Server: body G. Client: head P_k, at first that of the common initial model. Down: G, and W_k after the server's
    step. Up: G_k, W_k, u_k and n_k. Evaluated: the latest G with the client's P_k (``personalized``), after training
    (G_k, P_k) (``local``); a client never sampled has the initial head. There is no global model.

    References:
        Liu, Shen, Yang: Federated Representation Learning in the Under-Parameterized Regime, ICML 2024 (the variant
        for classification by networks; its linear one has other regularisers).
    """

    name: Literal["flute"] = "flute"
    citation: ClassVar[str] = "Liu et al., ICML 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "heads are drawn towards a simplex of the client's classes"}
    no_privacy: ClassVar[str] = "its clients send their heads one by one, and which classes they have"
    client_keeps: ClassVar[str] = "P_k"
    server_keeps: ClassVar[str] = "G"

    head_group: Literal["last_layer"] = setting("last_layer", "", "the head: the last linear layer")
    collapse_weight: float = setting(0.25, "lambda_1", "weight of the head's distance to neural collapse", ge=0)
    head_decay: float = setting(0.0025, "lambda_2", "weight of the squared norm of the head's weight", ge=0)
    feature_weight: float = setting(
        0.0005,
        "lambda_3",
        "weight of the mean squared norm of features, while the body is trained",
        ge=0,
        unless={"joint_epochs": (0,)},
    )
    head_epochs: int | None = setting(4, "tau_h", "epochs of the head alone; null: train.local_epochs", ge=0)
    joint_epochs: int | None = setting(1, "tau_b", "epochs of head and body; null: train.local_epochs", ge=0)
    server_lr: float = setting(
        0.5, "eta_s", "the server's step on the heads of the cohort; 0: none, and heads stay with their clients", ge=0
    )

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("FLUTE", task.network)
        super().check(task, context)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return epochs_without_effect(self, ("head_epochs", "joint_epochs"), context.train)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        changed = super().round(server, cohort, clients)
        if not self.server_lr:
            return changed
        reports = clients.map(self.report, cohort, broadcast={})
        slope, rate = torch.func.grad(collapse), self.server_lr / len(reports)
        stepped = {
            client: {"weight": head["weight"] - rate * slope(head["weight"], head["seen"])}
            for client, head in reports.items()
        }
        clients.map(self.adopt, cohort, broadcast={}, payloads=stepped)
        return changed

    async def train_model(self, client: Client, model: Tree) -> Tree:
        fitted = {**model, **await self.train_head(client, model, self.head_epochs)}
        if self.joint_epochs == 0:
            return fitted
        plain = not (self.collapse_weight or self.head_decay or self.feature_weight)
        trained: Tree = await client.train(
            fitted,
            loss() if plain else self.joint_objective,
            frozen={"seen": self.seen(client, model)},
            epochs=self.joint_epochs,
            # without a first pass the second one is the round's first
            stream="" if self.head_epochs == 0 else ".1",
        )
        return trained

    async def train_head(self, client: Client, model: Tree, epochs: int | None, stream: str = "") -> Tree:
        """Trains the head of a model, left as it is; returns the head."""
        return await self.train_part(
            client,
            model,
            client.task.network.head_names,
            epochs,
            stream,
            objective=self.head_objective,
            reads={"seen": self.seen(client, model)},
        )

    def head_objective(self, moving: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE + lambda_1 NC + lambda_2 ||W||^2 of the frozen model with the moving head."""
        model = {**frozen["model"], **moving}
        return task.loss(model, batch) + self.regularizer(model[task.network.head_weight], frozen["seen"])

    def joint_objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE + lambda_1 NC + lambda_2 ||W||^2 + lambda_3 mean ||f||^2."""
        features, logits = task.head_inputs_and_logits(model, batch)
        lengths = batch.mean(features.square().sum(-1))
        value = task.loss_of(logits, batch) + self.regularizer(model[task.network.head_weight], frozen["seen"])
        return value + self.feature_weight * lengths

    def regularizer(self, weight: Tensor, seen: Tensor) -> Tensor:
        """lambda_1 NC(W; u) + lambda_2 ||W||^2."""
        return self.collapse_weight * collapse(weight, seen) + self.head_decay * weight.square().sum()

    @staticmethod
    def seen(client: Client, model: Model) -> Tensor:
        """u_k, shape (C,)."""
        weight = model[client.task.network.head_weight]
        return (class_counts(client.examples().y, len(weight)) > 0).to(weight)

    async def report(self, client: Client) -> Tree:
        """W_k and u_k."""
        head = client.state["personal"]
        return {"weight": head[client.task.network.head_weight], "seen": self.seen(client, head)}

    async def adopt(self, client: Client, weight: Tensor) -> Tree:
        """Takes the weight that the server sends into the head."""
        client.state["personal"] = {**client.state["personal"], client.task.network.head_weight: weight}
        return {}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Fits a head to the body, which stays as it is."""
        model = self.assembled(client, server["shared"])
        client.state["personal"] = await self.train_head(client, model, None, ".join")
        return {}
