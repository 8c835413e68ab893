"""FedAS: a received body is first aligned with the client's own features, and bodies are weighted by Fisher traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.func import grad

from algorithms.base import Clients, check_head, setting
from algorithms.parts.accumulators import ACCUMULATOR, adding, check_unclipped
from algorithms.parts.partial import PartialModel, part, shared_part
from algorithms.parts.prototypes import class_means, memberships
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import Sum, function, loss
from rayfl.optimization.optimizers import ParameterGroup
from rayfl.params import Tree, copy, squared_norm
from rayfl.tasks.base import Batch, Model, Predictor, Task, Trait

LEAST_TRACE = 1e-9
"""A smaller Fisher trace counts as 0."""


class FedAS(PartialModel):
    """FedAS: FedPer with an alignment of the received body, and with Fisher traces for weights.

    With f(x) the input of the last linear layer, a client that holds the body B_k and the head P_k it last trained

        takes its mean features mu_y by class at (B_k, P_k), in evaluation mode
        G' <- E_a epochs on the body from the received G:  sum_y mean_{x of y} mean (f(x) - mu_y)^2
        (B_k, P_k) <- E epochs from (G', P_k):              CE

    and keeps both. The sum is over the classes in a mini-batch, the outer mean over their samples, the inner one over
    features; these steps are of plain SGD. The server takes the mean of the B_k with the weights

        F_k = sum over mini-batches of ||gradient of the mean cross-entropy at (B_k, P_k)||^2

    over all parameters, in evaluation mode. A client with F_k = 0 is left out; if all are, the weights are n_k.

    Server: body G. Client: B_k and P_k, at first those of the common initial model; P_k is never sent. Down: G. Up: B_k
    and F_k. Evaluated: the model (B_k, P_k) as the client keeps it (``personalized``), and the latest G with P_k, what
    FedPer would report (``received``); a client never sampled keeps the initial model. There is no global model.

    References:
        Yang, Huang, Ye: FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024, its
        federated parameter-alignment and client-synchronization.
    """

    name: Literal["fedas"] = "fedas"
    citation: ClassVar[str] = "Yang et al., CVPR 2024"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "features are aligned with mean features by class"}
    client_keeps: ClassVar[str] = "B_k, P_k"
    server_keeps: ClassVar[str] = "G"
    newcomer: ClassVar[str] = "the body, and a head that it fits to that"

    head_group: Literal["last_layer"] = setting("last_layer", "", "the head: the last linear layer")
    aggregation: Literal["fisher", "samples", "uniform", "population"] = setting(  # type: ignore[assignment]
        "fisher",
        "q_k",
        "weights of the mean: F_k; samples n_k / sum over the cohort; uniform 1/|S|; population n_k / sum over all "
        "clients, the rest staying on the old server model",
    )
    fisher_form: Literal["batches", "samples"] = setting(
        "batches",
        "F_k",
        "sum over mini-batches of squared norms of their mean gradients (official code), or the mean over samples of "
        "squared norms of theirs, which is a Fisher trace",
        only={"aggregation": ("fisher",)},
    )
    alignment_epochs: int = setting(1, "E_a", "epochs of the alignment; 0: none", ge=0)
    alignment_lr: float = setting(0.01, "", "learning rate of the alignment", ge=0, unless={"alignment_epochs": (0,)})
    alignment_form: Literal["samples", "means"] = setting(
        "samples",
        "",
        "what is drawn to mu_y: features of each sample (official code), or their mean in the mini-batch (FL-bench)",
        unless={"alignment_epochs": (0,)},
    )
    align_first: bool = setting(
        True,
        "",
        "align in a client's first participation too, to features of the initial model",
        unless={"alignment_epochs": (0,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("FedAS", task.network)
        super().check(task, context)
        if self.aggregation == "fisher":
            check_unclipped("FedAS", "algorithm.aggregation=fisher", context)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        if self.aggregation != "fisher":
            return super().round(server, cohort, clients)
        found = clients.means(self.local_update, cohort, broadcast={"shared": shared_part(server)})
        return {"shared": found.get("fisher", found.get("samples"))}

    async def local_update(self, client: Client, shared: Tree) -> Weighted:
        network = client.task.network
        aligned = await self.aligned(client, shared)
        trained = await client.train(self.assembled(client, aligned), self.objective)
        body = part(trained, self.shared(network))
        client.state.update(personal=part(trained, self.personal(network)), body=copy(body))
        client.publish(local=Predictor.of(trained))
        if self.aggregation != "fisher":
            return self.weighted(client, body)
        trace = await self.fisher_trace(client, trained)
        return (
            Weighted(body, trace, "fisher") if trace >= LEAST_TRACE else Weighted(body, client.num_samples, "samples")
        )

    async def aligned(self, client: Client, shared: Tree) -> Tree:
        """G': the received body, drawn to the features of the body that the client last trained."""
        names = self.shared(client.task.network)
        trains = set(names) & set(client.task.network.parameter_names)
        if self.alignment_epochs == 0 or not trains or not (self.align_first or "body" in client.state):
            return shared
        old = self._kept(client)
        features = await client.outputs(lambda x, task: task.network.head_inputs_and_logits(old, x)[0])
        means = class_means(features, client.examples().y, client.task.network.head_shape[0])[1]
        trained = await client.train(
            {"body": dict(shared)},
            self.alignment_objective,
            frozen={"head": part(old, self.personal(client.task.network)), "means": means.to(features)},
            epochs=self.alignment_epochs,
            groups={
                "body": ParameterGroup(lr=self.alignment_lr, momentum=0.0, weight_decay=0.0, optimizer="sgd"),
            },
            keep_optimizer=False,
            stream=".align",
        )
        return part(trained["body"], names)

    async def fisher_trace(self, client: Client, model: Tree) -> float:
        """F_k of a model, from one pass over the samples, however many steps a local update has."""
        train, by_sample = client.context.train, self.fisher_form == "samples"
        once = {"min_local_steps": 0, "max_local_steps": None, "drop_last": train.drop_last and not by_sample}
        found = await client.train(
            {"trace": model[client.task.network.head_weight].new_zeros(())},
            self.fisher_objective,
            frozen={"model": model},
            epochs=1,
            settings=train.model_copy(update=once),
            groups={"trace": ACCUMULATOR},
            keep_optimizer=False,
            stream=".fisher",
        )
        return float(found["trace"]) / (client.num_samples if by_sample else 1)

    @property
    def objective(self) -> Sum:
        """The cross-entropy."""
        return loss()

    @property
    def alignment_objective(self) -> Sum:
        """The sum over classes of the mean squared distance of their features to mu_y."""
        return function(self._alignment)

    @property
    def fisher_objective(self) -> Sum:
        """Returns what adds up squared norms of gradients."""
        return function(self._squared_gradients)

    def _alignment(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        features, _ = task.head_inputs_and_logits({**frozen["head"], **trained["body"]}, batch)
        means = frozen["means"]
        members = memberships(batch, means)
        counts = members.sum(0)
        shares = members / counts.clamp(min=1)
        if self.alignment_form == "means":
            distances = (shares.T @ features - means).square().mean(-1)
            return torch.where(counts > 0, distances, 0.0).sum()
        value: Tensor = (shares.sum(1) * (features - means[batch.y]).square().mean(-1)).sum()
        return value

    def _squared_gradients(self, trained: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        model = frozen["model"]
        moved, fixed = part(model, task.network.parameter_names), part(model, task.network.buffer_names)

        def mean_loss(parameters: Tree, of: Batch) -> Tensor:
            return task.loss_of(task.logits({**parameters, **fixed}, of, training=False), of)

        if self.fisher_form == "batches":
            return adding(trained["trace"], squared_norm(grad(mean_loss)(moved, batch)))
        norms = torch.stack(
            [
                squared_norm(grad(mean_loss)(moved, Batch(batch.x[i : i + 1], batch.y[i : i + 1])))
                for i in range(len(batch.y))
            ]
        )
        return adding(trained["trace"], (norms if batch.mask is None else norms * batch.mask).sum())

    async def join(self, client: Client, server: Tree) -> Tree:
        """Fits a head to the received body, and keeps that body as if it had trained it."""
        await super().join(client, server)
        client.state["body"] = shared_part(server)
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        received = self.assembled(client, shared_part(server))
        return {"personalized": Predictor.of(self._kept(client)), "received": Predictor.of(received)}

    def _kept(self, client: Client) -> Model:
        """The model that the client last trained, or the initial one."""
        body: Tree | None = client.state.get("body")
        return client.initial_model() if body is None else self.assembled(client, body)
