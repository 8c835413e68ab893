"""FedMTL: each client's model is a task's, and a matrix of relationships between tasks pulls them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.partial import part
from algorithms.parts.split_clusters import gram
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, frozen, loss, squared_distance
from rayfl.params import TINY, Tree, copy, subtract, tensors, weighted_sums
from rayfl.tasks.base import Predictor, Task


def mean_relationship(count: int) -> Tensor:
    """Omega = I - 1/m 1 1^T, with which tr(W Omega W^T) is the sum of the squared distances to the mean model.

    Args:
        count: m.
    """
    return torch.eye(count, dtype=torch.float64) - 1 / count


def learned_relationship(products: Tensor, damping: float) -> Tensor:
    """Omega = (Sigma + epsilon I)^-1, Sigma = (W^T W)^1/2 / tr (W^T W)^1/2; Sigma = I/m where W is zero.

    Args:
        products: W^T W, float64 of shape (m, m).
        damping: epsilon > 0.
    """
    values, vectors = torch.linalg.eigh(products)
    roots = values.clamp(min=0).sqrt()
    shares = roots / roots.sum() if float(roots.sum()) > TINY else torch.full_like(roots, 1 / len(roots))
    found: Tensor = (vectors / (shares + damping)) @ vectors.T
    return found


class FedMTL(Algorithm):
    """FedMTL (federated multi-task learning): personal models under a penalty of the relationships between them.

    This is the objective of MOCHA, on the weights of any network in the place of linear models:

        sum_i F_i(w_i) + lambda/2 tr(W Omega W^T),    W = (w_1 - w_0, ..., w_m - w_0)

    with w_0 the initial model, and for the m clients that have trained. ``relationship`` ``mean`` has the fixed
    Omega = I - 1/m 1 1^T (Evgeniou and Pontil), whose penalty is that of all distances to the mean model. ``learned``
    has MOCHA's, taken from the models as last trained before every round:

        Omega = (Sigma + epsilon I)^-1,    Sigma = (W^T W)^1/2 / tr (W^T W)^1/2

    MOCHA's steps in the dual (SDCA) are for convex losses of linear models. Here client i of the cohort descends the
    objective in w_i, from where it was, by the training section's steps, while the others' models stay. Its part is

        F_i(w_i) + lambda/2 Omega_ii ||w_i - c_i||^2,    c_i = w_0 - sum_{j != i} Omega_ij / Omega_ii (w_j - w_0)

    so that one model and one number is all that it needs of the others. A client that trains for the first time, or
    alone has trained, is not pulled. Buffers (running statistics) are each client's own.

    Server: the parameters of w_1..w_K of all clients that have trained, and w_0. Client: w_k. Down: c_i (at first w_0)
    and lambda Omega_ii. Up: the parameters of w_i. Evaluated: w_i (``personalized``); a client never sampled has the
    initial model. There is no global model. With lambda = 0 it is local training.

    References:
        Smith, Chiang, Sanjabi, Talwalkar: Federated Multi-Task Learning, NeurIPS 2017, problem (1) and its
        relationships; Evgeniou, Pontil: Regularized Multi-Task Learning, KDD 2004 (``mean``).
    """

    name: Literal["fedmtl"] = "fedmtl"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Smith et al., NeurIPS 2017"
    client_keeps: ClassVar[str] = "w_k"
    server_keeps: ClassVar[str] = "w_1..w_K, w_0"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = "a model that it trains alone: it is related to no other yet"

    penalty_weight: float = setting(0.1, "lambda", "weight of the penalty; 0: local training", ge=0)
    relationship: Literal["mean", "learned"] = setting(
        "mean",
        "Omega",
        "fixed, all models near their mean, or MOCHA's, learned from the models",
        unless={"penalty_weight": (0,)},
    )
    damping: float = setting(
        0.1,
        "epsilon",
        "added to the eigenvalues of Sigma, of sum 1, before it is inverted; the smaller, the stronger the pull",
        gt=0,
        only={"relationship": ("learned",)},
        unless={"penalty_weight": (0,)},
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if context.train.optimizer != "sgd":
            return
        largest = 1 / self.damping if self.relationship == "learned" else 1.0
        moved = max(context.train.lr_in(t) for t in range(context.rounds)) * self.penalty_weight * largest
        if moved >= 1:
            raise ConfigError(
                f"a step's pull may overshoot: the learning rate times algorithm.penalty_weight times the largest "
                f"possible Omega_ii, {largest:g}, is {moved:.3g}, not below 1; lower algorithm.penalty_weight or "
                "train.lr, or with relationship=learned raise algorithm.damping"
            )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        own, names = server.get("own", {}), clients.task.network.parameter_names
        initial = part(server["model"], names)
        payloads: dict[int, Tree] = {client: {"center": initial, "pull": 0.0} for client in cohort}
        known = [client for client in cohort if str(client) in own]
        if known and len(own) > 1:
            payloads |= self.pulls(known, own, initial)
        trained = clients.map(self.local_update, cohort, broadcast={}, payloads=payloads)
        return {"own": {**own, **{str(client): model for client, model in trained.items()}}}

    def pulls(self, clients: Sequence[int], own: Tree, initial: Tree) -> dict[int, Tree]:
        """Returns c_i and lambda Omega_ii, by client.

        Args:
            clients: i, who have trained before.
            own: w_j by client as last trained, of two at least.
            initial: w_0.
        """
        places = [list(own).index(str(client)) for client in clients]
        if self.relationship == "mean":
            omega = mean_relationship(len(own))
        else:
            omega = learned_relationship(gram([subtract(model, initial) for model in own.values()]), self.damping)
        diagonal = omega.diagonal()[places]
        shares = -omega[places] / diagonal[:, None]
        shares[range(len(places)), places] = 0
        # the rows of ``mean`` have sum 1, and nothing of w_0
        rest = 1 - shares.sum(1, keepdim=True) if self.relationship == "learned" else torch.zeros(len(places), 1)
        centers = weighted_sums([*own.values(), initial], torch.cat([shares, rest.double()], 1))
        return {
            client: {"center": center, "pull": self.penalty_weight * float(strength)}
            for client, center, strength in zip(clients, centers, diagonal, strict=True)
        }

    async def local_update(self, client: Client, center: Tree, pull: float) -> Tree:
        """Trains the own model; returns its parameters.

        Args:
            client: i.
            center: c_i.
            pull: lambda Omega_ii; 0 where there is nothing to be pulled to.
        """
        start = client.state["personal"] if "personal" in client.state else client.initial_model()
        # a tensor, so that clients with unequal pulls can be trained together
        weight = next(iter(tensors(start))).new_tensor(pull)
        trained = await client.train(start, self.objective, frozen={"center": center, "pull": weight})
        client.state["personal"] = copy(trained)  # what is sent is the server's
        client.publish(personalized=Predictor.of(trained))
        return part(trained, client.task.network.parameter_names)

    @property
    def objective(self) -> Any:
        """F_i + lambda/2 Omega_ii ||w_i - c_i||^2."""
        return loss() + frozen("pull") * squared_distance(TRAINED, "center") / 2

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {}

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}  # a center is as long

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """Nothing: each client has its own model."""
        return {}, {}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains the initial model alone, as every client does at first."""
        client.state["personal"] = await client.train(client.initial_model(), loss())
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        own: Tree = client.state["personal"] if "personal" in client.state else client.initial_model()
        return {"personalized": Predictor.of(own)}
