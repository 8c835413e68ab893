"""GPFL: a valve makes a global and a personal version of every feature vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Clients, check_head, setting
from algorithms.parts.heads import head_logits
from algorithms.parts.layers import draw_linear, linear, normalized, unit_norm
from algorithms.parts.partial import PartialModel, part
from algorithms.parts.prototypes import class_counts
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait

SHARED = ("shared", "valve", "embedding")
"""What travels."""
_TINY = 1e-12


class GPFL(PartialModel):
    """GPFL: shared body, and a shared valve that turns its features into global and personal ones.

    With f(x) in R^d the input of the last linear layer, E (C, d) a table of category embeddings and LN a layer
    normalization, the valve is

        CoV(f, u) = ReLU(f (gamma + 1) + beta),    gamma = LN(ReLU(A_1 u + b_1)),  beta = LN(ReLU(A_2 u + b_2))

    It is opened by p_k = sum_y n_ky/n_k E_y for the personal features f_P, and by g = 1/C sum_y E_y for the global ones
    f_G, both of the received E and constant in a round; before the first aggregation both are 0. A client trains the
    body, its head W_k, the valve and E together on

        CE(W_k f_P, y) + CE(cos(f_G, E), y) + lambda ||F_G - E'[y]||_F

    where the cosines with all rows of E are logits, F_G has the f_G of the mini-batch as rows, and E' is the received
    E, a constant. Valve and E have the weight decay mu.

    Server: body G, valve, E. Client: head W_k, at first that of the common initial model; never sent. Down: G, valve,
    E. Up: all three as trained, and n_k. Evaluated: W_k CoV(f, p_k) with the latest G, valve and E (``personalized``);
    a client never sampled has the initial head. There is no global model.

    References:
        Zhang, Hua, Wang, Song, Xue, Ma, Cao, Guan: GPFL: Simultaneously Learning Global and Personalized Feature
        Information for Personalized Federated Learning, ICCV 2023, its conditional valve and category embeddings.
    """

    name: Literal["gpfl"] = "gpfl"
    citation: ClassVar[str] = "Zhang et al., ICCV 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "every class has an embedding"}
    client_keeps: ClassVar[str] = "W_k"
    server_keeps: ClassVar[str] = "G, CoV, E"
    newcomer: ClassVar[str] = "body, valve and embeddings, and a head after a local update"

    head_group: Literal["last_layer"] = setting("last_layer", "", "the head: the last linear layer")
    guidance_weight: float = setting(
        0.01, "lambda", "weight of the distance of global features to the embeddings of their classes", ge=0
    )
    module_weight_decay: float = setting(
        0.1, "mu", "weight decay of valve and embeddings", ge=0, unless={"module_lr": (0,)}
    )
    module_lr: float | None = setting(
        None, "", "learning rate of valve and embeddings; null: that of the round, 0: they stay as they are", ge=0
    )
    conditional_from: Literal["received", "own"] = setting(
        "received",
        "",
        "what g and p_k are made of: the received E, or the one that the client itself trained last (official code)",
        kept=True,
    )

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("GPFL", task.network)
        super().check(task, context)

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = task.network.initialize(context.streams.integer("init.global"))
        weight, generator = model[task.network.head_weight], context.streams.generator("init.valve")
        width = weight.shape[1]
        valve = {
            name: {**draw_linear(width, width, weight, generator), **unit_norm(width, weight)}
            for name in ("gamma", "beta")
        }
        embedding = torch.from_numpy(generator.standard_normal(tuple(weight.shape))).to(weight)
        shared = part(model, self.shared(task.network))
        return {"shared": shared, "valve": valve, "embedding": embedding, "aggregated": 0}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        tree = {name: server[name] for name in SHARED}
        rest = self.remainder(tree, cohort, clients)
        update = self.guided_update if server["aggregated"] else self.first_update
        return {**clients.mean(update, cohort, broadcast=tree, also=rest), "aggregated": 1}

    async def first_update(self, client: Client, shared: Tree, valve: Tree, embedding: Tensor) -> Weighted:
        """Trains as :meth:`guided_update` does, with both conditions 0, as they are before the first aggregation."""
        return await self.guided_update(client, shared, valve, embedding, aggregated=False)

    async def guided_update(
        self, client: Client, shared: Tree, valve: Tree, embedding: Tensor, aggregated: bool = True
    ) -> Weighted:
        """Trains all parts, and keeps the head."""
        network = client.task.network
        common, personal = self.conditions(client, embedding, aggregated)
        rule = ParameterGroup(lr=self.module_lr, weight_decay=self.module_weight_decay)
        trained = await client.train(
            {"model": self.assembled(client, shared), "valve": valve, "embedding": embedding},
            self.objective,
            frozen={"embedding": embedding, "global": common, "personal": personal},
            groups={"valve": rule, "embedding": rule},
        )
        model = trained["model"]
        client.state["personal"] = part(model, self.personal(network))
        if self.conditional_from == "own":
            client.state["embedding"] = trained["embedding"].clone()
        client.publish(local=_opened(model, trained["valve"], personal))
        sent = {"shared": part(model, self.shared(network)), "valve": trained["valve"]}
        return self.weighted(client, {**sent, "embedding": trained["embedding"]})

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        tree = {name: server[name] for name in SHARED}
        await (self.guided_update if server["aggregated"] else self.first_update)(client, **tree)
        return {}

    def conditions(self, client: Client, embedding: Tensor, aggregated: bool) -> tuple[Tensor, Tensor]:
        """g and p_k, shape (d,) each.

        Args:
            client: the client.
            embedding: the received E, shape (C, d).
            aggregated: whether there was an aggregation; otherwise both are 0.
        """
        if not aggregated:
            return torch.zeros_like(embedding[0]), torch.zeros_like(embedding[0])
        if self.conditional_from == "own":
            embedding = client.state.get("embedding", embedding)
        counts = class_counts(client.examples().y, len(embedding))
        even = torch.ones_like(counts)
        common, personal = ((shares / shares.sum()).to(embedding) @ embedding for shares in (even, counts))
        return common, personal

    @property
    def objective(self) -> Sum:
        """The three losses, from one forward pass of the body."""
        return function(self._three_losses)

    def _three_losses(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, _ = task.head_inputs_and_logits(trained["model"], batch)
        personal = valve(trained["valve"], features, frozen["personal"])
        value = task.loss_of(head_logits(task.network, trained["model"], personal), batch)
        return value + self.guidance(trained, features, batch, task, frozen)

    def guidance(self, trained: Any, features: Tensor, batch: Batch, task: Task, frozen: Any) -> Tensor:
        """The two losses of the global features; a scalar."""
        common = valve(trained["valve"], features, frozen["global"])
        value = task.loss_of(cosines(common, trained["embedding"]), batch)
        if self.guidance_weight == 0:
            return value
        squares = (common - frozen["embedding"][batch.y]).square().sum(-1)
        total: Tensor = (squares if batch.mask is None else squares * batch.mask).sum()
        return value + self.guidance_weight * (total + _TINY).sqrt()

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        personal = self.conditions(client, server["embedding"], bool(server["aggregated"]))[1]
        return {"personalized": _opened(self.assembled(client, server["shared"]), server["valve"], personal)}


def valve(tensors: Mapping[str, Mapping[str, Tensor]], features: Tensor, condition: Tensor) -> Tensor:
    """CoV(f, u).

    Args:
        tensors: of the valve.
        features: f, shape (b, d).
        condition: u, shape (d,).
    """
    gamma, beta = (normalized(tensors[name], linear(tensors[name], condition).relu()) for name in ("gamma", "beta"))
    return (features * (gamma + 1) + beta).relu()


def cosines(features: Tensor, table: Tensor) -> Tensor:
    """Cosines of the angles between rows of features (b, d) and of a table (C, d), shape (b, C)."""
    return F.normalize(features, dim=-1, eps=1e-8) @ F.normalize(table, dim=-1, eps=1e-8).T


def _opened(model: Model, tensors: Model, condition: Tensor) -> Predictor:
    """The prediction from features behind a valve."""
    return Predictor.of(model, tensors, {"condition": condition}, combine=_log_probabilities)


def _log_probabilities(models: Sequence[Any], x: Tensor, task: Any) -> Tensor:
    """Log-probabilities (b, C) of (model, valve, condition)."""
    model, tensors, opened_by = models
    features, _ = task.network.head_inputs_and_logits(model, x, training=False)
    return head_logits(task.network, model, valve(tensors, features, opened_by["condition"])).log_softmax(-1)
