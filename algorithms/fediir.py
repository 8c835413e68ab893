"""FedIIR: clients' gradients of the last layer are drawn to their mean, for people and domains not met before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Aggregation, Averaging, Clients, check_head, setting
from algorithms.parts.heads import head_logits
from algorithms.parts.partial import part
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import TRAINED, Sum, function, loss
from rayfl.params import Tree, interpolate, zeros_like
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_NO_PENALTY = {"penalty_weight": (0,)}


class FedIIR(Averaging):
    """FedIIR: federated averaging whose clients keep their gradients of the classifier near the mean of all.

    Let phi be the last linear layer. The cohort S sends the gradients g_i over all its samples at the received w, and
    the server moves its mean gradient g, which is zero at first,

        g <- eps g + (1 - eps) sum_{i in S} n_i g_i / sum_{i in S} n_i,    g_i = grad_phi CE_i(w)

    and sends it back. Then client i minimises, with B a mini-batch and g a constant,

        CE_B(w_i) + gamma ||grad_phi CE_B(w_i) - g||^2

    The slope of the penalty goes through the gradient, into phi and into the layers before it. Where clients would
    rather move the classifier in different directions, the features say something that holds for some of them only.

    Server: model w and g. Client: nothing. Down: w, then g. Up: g_i (with n_i), then w_i. Evaluated: w (``global``).
    gamma = 0 is federated averaging, and no gradient travels. Newcomers have the same: the method is made for clients
    that take no part in training.

    References:
        Guo, Guo, Cao, Wu, Chang: Out-of-Distribution Generalization of Federated Learning via Implicit
        Invariant Relationships, ICML 2023.
    """

    name: Literal["fediir"] = "fediir"
    citation: ClassVar[str] = "Guo et al., ICML 2023"
    no_privacy: ClassVar[str] = "its clients send gradients of the last layer beside their models"
    needs: ClassVar[Mapping[Trait, str]] = {"features": "a penalty is on the gradient of the layer that reads them"}
    server_keeps: ClassVar[str] = "w, g"

    aggregation: Aggregation = setting(
        "uniform",
        "q_k",
        "weights of the mean of the models: uniform 1/|S| (authors' code); samples n_k / sum over the cohort; "
        "population n_k / sum over all clients, the rest staying on the old server model; tokens those that a "
        "language model learns, in place of samples",
    )
    penalty_weight: float = setting(1e-3, "gamma", "weight of the squared distance of gradients", ge=0)
    momentum: float = setting(
        0.95, "eps", "share of the old mean gradient in the new one", ge=0, lt=1, unless=_NO_PENALTY
    )

    def check(self, task: Task, context: RoundContext) -> None:
        check_head("FedIIR", task.network)
        super().check(task, context)

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        return {"model": model, "gradient": zeros_like(part(model, task.network.head_names))}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        if not self.penalty_weight:
            return super().round(server, cohort, clients)
        model = server["model"]
        found = clients.mean(self.report, cohort, broadcast={"model": model})["gradient"]
        gradient = interpolate(found, server["gradient"], self.momentum)
        rest = self.remainder(model, cohort, clients)
        return {
            "model": clients.mean(self.aligned_update, cohort, broadcast={"gradient": gradient}, also=rest),
            "gradient": gradient,
        }

    async def report(self, client: Client, model: Tree) -> Weighted:
        """The gradient of the last layer over all samples of the client; keeps the model until it trains."""
        network = client.task.network
        client.state["received"] = model
        point = part(model, (*network.head_names, *network.buffer_names))
        found = await client.gradient(point, loss(TRAINED, completed_by="model"), frozen={"model": model})
        return Weighted({"gradient": part(found, network.head_names)}, client.num_samples)

    async def aligned_update(self, client: Client, gradient: Tree) -> Weighted:
        """Trains the received model towards the mean gradient."""
        trained = await client.train(
            client.state.pop("received"), self.aligned_objective, frozen={"gradient": gradient}
        )
        client.publish(local=Predictor.of(trained))
        return self.weighted(client, trained)

    @property
    def aligned_objective(self) -> Sum:
        """The loss and the penalty, from one forward pass."""
        return function(self._aligned)

    def _aligned(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        network = task.network
        features, logits = task.head_inputs_and_logits(model, batch)

        def of_head(head: Mapping[str, Tensor]) -> Tensor:
            return task.loss_of(head_logits(network, head, features), batch)

        slope = torch.func.grad(of_head)(part(model, network.head_names))
        apart = sum((slope[name] - mean).square().sum() for name, mean in frozen["gradient"].items())
        value: Tensor = task.loss_of(logits, batch) + self.penalty_weight * apart
        return value

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}
