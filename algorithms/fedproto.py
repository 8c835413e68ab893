"""FedProto: clients share class means of features, and nothing of their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.accumulators import ACCUMULATOR, adding, check_unclipped
from algorithms.parts.aligned_models import AlignedModels
from algorithms.parts.architectures import task_of
from algorithms.parts.prototypes import class_means, memberships, renewed
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class FedProto(AlignedModels):
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

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
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
            {"model": self.own(client), **collected},
            self.objective if pulled or self.prototypes_at == "during" else self.plain_objective,
            frozen={"prototypes": prototypes},
            groups=dict.fromkeys(collected, ACCUMULATOR),
            task=task,
        )
        model = client.state["local"] = trained["model"]
        client.publish(**self.rows(client, model, prototypes))
        if self.prototypes_at == "during":
            sums, counts = trained["sums"].double(), trained["counts"].double()
            own = sums / counts.clamp(min=1)[:, None]
        else:
            features = await client.outputs(lambda x, t: t.network.head_inputs_and_logits(model, x)[0], task=task)
            counts, own = class_means(features, client.examples().y, len(means))
        shares = counts if self.prototype_weights == "samples" else (counts > 0).double()
        return Weighted({"sums": (shares[:, None] * own).to(means), "counts": shares.to(means)})

    def aligned(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """The objective's value; collects features by class if that is asked for."""
        if self.prototypes_at == "after":
            return super().aligned(trained, batch, task, frozen, draw)
        features, logits = task.head_inputs_and_logits(trained["model"], batch)
        value = self.aligned_loss(features, logits, batch, task, frozen["prototypes"])
        members = memberships(batch, frozen["prototypes"]["exist"])
        return value + adding(trained["sums"], members.T @ features) + adding(trained["counts"], members.sum(0))

    async def join(self, client: Client, server: Tree) -> Tree:
        """Does what a client of a cohort does, and sends nothing."""
        await self.local_update(client, server["prototypes"])
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return self.rows(client, self.own(client), server["prototypes"])
