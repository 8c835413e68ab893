"""FedPCL: models of the clients' own, whose features are contrasted with the class prototypes of all clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.aligned_models import FLOOR, FeatureModels
from algorithms.parts.architectures import task_of
from algorithms.parts.partial import part
from algorithms.parts.prototypes import class_means, memberships
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import Sum, function
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait


class FedPCL(FeatureModels):
    """FedPCL: every client trains features of its own by contrasts with the class prototypes of all clients.

    With z(x) = f(x) / ||f(x)|| in R^d, f(x) being the input of the last linear layer, p_ky the mean of z over client
    k's samples of class y, and P_y the mean of p_ky over the clients that have the class, client k goes down

        L_g + L_p,    L_g = mean -log[ e^(z . P_y / tau) / sum_{a in A(y)} e^(z . P_a / tau) ]
        L_p = mean_j mean -log[ e^(z . p_jy / tau) / sum_{a in A(y)} e^(z . p_ja / tau) ]

    over what is before the last layer of its own model v_k. A(y) are the classes other than y of which anybody has sent
    a prototype, and j goes over all clients that have sent any. Where j lacks a class, p_jy is P_y. Samples of classes
    without prototype take no part. After training client k sends p_ky of its trained model in evaluation mode. Nobody
    trains while fewer than two classes have a prototype, as in the first round, in which prototypes are only made.

    The paper trains a projection on top of one or more fixed pretrained networks, which v_k may be: whatever of it is
    before the last layer and not fixed is trained. The last layer stays as it was drawn.

    Server: p_ky of all clients as they were last sent, with marks of those that exist, and P_y. Client: p_ky, and v_k,
    which is never sent. Down: P_y with marks, and p_jy. Up: p_ky with marks. Evaluated: the class of the nearest
    prototype, argmin_y ||z(x) - p_y||, among the client's own p_ky (``own``) or among all P_y (``shared``); one of them
    is ``personalized`` (``inference``), the other has its own name. A client without prototypes of its own has those
    of all; before there are any, its initial last layer. There is no global model.

    Clients may have different architectures (``model.candidates``) of one d: each client's is drawn.

    References:
        Tan, Long, Ma, Liu, Zhou, Jiang: Federated Learning from Pre-Trained Models: A Contrastive Learning Approach,
        NeurIPS 2022.
    """

    name: Literal["fedpcl"] = "fedpcl"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Tan et al., NeurIPS 2022"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "prototypes are mean features by class"}
    client_keeps: ClassVar[str] = "v_k, p_ky"
    server_keeps: ClassVar[str] = "p_ky, P_y"
    newcomer: ClassVar[str] = "the prototypes, and a model after a local update"
    mixes_architectures: ClassVar[bool] = True

    temperature: float = setting(0.07, "tau", "temperature of the contrasts", gt=0)
    negatives: Literal["others", "all"] = setting(
        "others", "A(y)", "classes in a contrast's denominator: all but the sample's own (paper), or all (PFLlib)"
    )
    contrast: Literal["both", "global", "local"] = setting(
        "both", "", "what features are contrasted with: L_g + L_p, L_g alone, or L_p alone"
    )
    inference: Literal["own", "shared"] = setting(
        "own", "", "prototypes whose nearest is called personalized: the client's own (public codes), or those of all"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        for candidate in task.candidates:
            network = candidate.network
            if not set(network.body_names) & set(network.parameter_names):
                raise ConfigError(
                    "FedPCL trains what is before the last layer, and this model trains no layer there: choose a model "
                    "with more layers, or let more of it be trained"
                )

    def init(self, task: Task, context: RoundContext) -> Tree:
        like = next(iter(task.network.initialize(context.streams.integer("init.global")).values()))
        classes, width = task.network.head_shape
        shape = (context.num_clients, classes)
        return {
            "sets": {"means": like.new_zeros((*shape, width)), "exist": like.new_zeros(shape)},
            "prototypes": {"means": like.new_zeros((classes, width)), "exist": like.new_zeros(classes)},
        }

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        sets = {name: leaf.clone() for name, leaf in server["sets"].items()}
        for client, reply in clients.map(self.local_update, cohort, broadcast=self.sent(server)).items():
            for name, leaf in sets.items():
                leaf[client] = reply[name]
        return {"sets": sets, "prototypes": mean_prototypes(sets["means"], sets["exist"])}

    async def local_update(self, client: Client, prototypes: Tree, sets: Tensor) -> Tree:
        """Trains the client's own model; returns its prototypes, and marks.

        Args:
            client: the client.
            prototypes: P_y, ``means`` of shape (C, d), and ``exist``.
            sets: p_jy of the clients that have sent any, shape (m, C, d).
        """
        task, model = task_of(client), self.own(client)
        network = task.network
        if int(prototypes["exist"].sum()) > 1:
            tables = {"global": prototypes["means"][None], "local": sets}
            trained = await client.train(
                part(model, network.body_names + network.buffer_names),
                self.objective,
                frozen={
                    "head": part(model, network.head_names),
                    "tables": tables if self.contrast == "both" else {self.contrast: tables[self.contrast]},
                    "exist": prototypes["exist"],
                },
                task=task,
            )
            model = {**model, **trained}
        features = await client.outputs(lambda x, t: unit_features(t, model, x), task=task)
        counts, means = class_means(features, client.examples().y, len(prototypes["exist"]))
        found = {"means": means.to(features), "exist": (counts > 0).to(features)}
        client.state["local"], client.state["prototypes"] = model, copy(found)
        client.publish(**self.rows(client, model, prototypes))
        return found

    @property
    def objective(self) -> Sum:
        """The contrasts with global and local prototypes, from one forward pass."""
        return function(self._contrasted)

    def _contrasted(self, body: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features = task.head_inputs_and_logits({**frozen["head"], **body}, batch)[0]
        directions, exist = F.normalize(features, dim=-1), frozen["exist"]
        others = self.negatives == "others"
        value = sum(
            contrasts(directions, batch, table, exist, self.temperature, others) for table in frozen["tables"].values()
        )
        return batch.mean(exist[batch.y] * value)

    def rows(self, client: Client, model: Tree, prototypes: Tree) -> dict[str, Predictor]:
        """Predictions of a model by the nearest of the client's own prototypes, and of those of all clients.

        Args:
            client: the client, whose state has its own prototypes.
            model: v_k.
            prototypes: P_y with marks.
        """
        task = task_of(client)
        if not prototypes["exist"].any():
            found = shared = Predictor.of(model, task=task)
        else:
            found = shared = self._nearest(model, prototypes, task)
        if "prototypes" in client.state:
            found = self._nearest(model, client.state["prototypes"], task)
        if self.inference == "own":
            return {"personalized": found, "shared": shared}
        return {"personalized": shared, "own": found}

    def _nearest(self, model: Tree, prototypes: Tree, task: Task) -> Predictor:
        return Predictor.of(model, prototypes, combine=partial(nearest_direction, self.temperature), task=task)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.local_update(client, server["prototypes"], server["sets"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return self.rows(client, self.own(client), server["prototypes"])

    def sent(self, server: Tree) -> Tree:
        """P_y with marks, and p_jy of the clients that have sent any, with P_y in place of those they lack."""
        sets, known = server["sets"], server["sets"]["exist"].any(1)
        lacks = sets["exist"][known] == 0
        filled = torch.where(lacks[..., None], server["prototypes"]["means"], sets["means"][known])
        return {"prototypes": server["prototypes"], "sets": filled}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """P_y; newcomers, which train before they are scored, get what a cohort gets."""
        sent = self.sent(server)
        own = {newcomer: {"sets": sent["sets"]} for newcomer in context.newcomers}
        return {"prototypes": sent["prototypes"]}, own


def mean_prototypes(means: Tensor, exist: Tensor) -> Tree:
    """P_y with marks, from p_ky of shape (K, C, d) and their marks of shape (K, C)."""
    counts = exist.double().sum(0)
    sums = (exist[..., None] * means).double().sum(0)
    return {"means": (sums / counts.clamp(min=1)[:, None]).to(means), "exist": (counts > 0).to(means)}


def contrasts(
    directions: Tensor, batch: Batch, tables: Tensor, exist: Tensor, temperature: float, others: bool
) -> Tensor:
    """-log of a sample's similarity to the prototype of its class over those to others, shape (b,); mean over tables.

    Args:
        directions: z, shape (b, d).
        batch: has the classes.
        tables: prototypes, shape (m, C, d).
        exist: which classes have a prototype, shape (C,); at least two.
        temperature: tau.
        others: whether the sample's own class is left out of the denominator.
    """
    similarities = torch.einsum("bd,mcd->mbc", directions, tables) / temperature
    members = memberships(batch, exist)
    left_out = (exist == 0) | (members > 0) if others else (exist == 0).expand_as(members)
    against = similarities.masked_fill(left_out, -math.inf).logsumexp(-1)
    return (against - (similarities * members).sum(-1)).mean(0)


def unit_features(task: Any, model: Model, x: Tensor) -> Tensor:
    """z(x) in evaluation mode, shape (b, d)."""
    return F.normalize(task.network.head_inputs_and_logits(model, x, training=False)[0], dim=-1)


def nearest_direction(temperature: float, models: Sequence[Model], x: Tensor, task: Any) -> Tensor:
    """Log-probabilities (b, C) of (model, prototypes): log-softmax of -||z - p_y||^2 / (2 tau)."""
    model, prototypes = models
    # not by a matrix product, in which the distances of near features cancel
    apart = torch.cdist(
        unit_features(task, model, x), prototypes["means"], compute_mode="donot_use_mm_for_euclid_dist"
    ).square()
    missing = prototypes["exist"] == 0
    scores = (-apart / (2 * temperature)).masked_fill(missing, -math.inf)
    found: Tensor = scores.log_softmax(-1).masked_fill(missing, FLOOR)
    return found
