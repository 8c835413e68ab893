"""q-FedAvg: federated averaging in which a client counts the more, the larger its loss is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.mixture import parameters
from algorithms.parts.relative_weights import relative
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import MethodError
from rayfl.params import Tree, interpolate, squared_distance
from rayfl.tasks.base import Predictor

ADDED = 1e-10
"""Added to every loss, which may be zero."""


def loss_weights(losses: Sequence[float], q: float) -> np.ndarray:
    """Returns F_k^q in units of the largest of them, so that no power leaves the range of numbers; shape (n,).

    Args:
        losses: F_k, positive.
        q: q.
    """
    return relative(q * np.log(np.asarray(losses, dtype=np.float64)))


class QFedAvg(FineTuned):
    """q-FedAvg: federated averaging for the fair objective sum_k p_k F_k(w)^(q+1) / (q+1).

    Client k of the cohort S takes the loss F_k(w) of the received model w over all its training samples, in evaluation
    mode, and then trains w to w_k. With L the Lipschitz constant of the gradients, which also scales the changes to
    gradients, the server takes

        w <- w - sum_k p_k Delta_k / sum_k p_k h_k,    g_k = L (w - w_k)
        Delta_k = F_k(w)^q g_k,    h_k = q F_k(w)^(q-1) ||g_k||^2 + L F_k(w)^q

    h_k is an upper bound of the local Lipschitz constant of F_k^(q+1) / (q+1), so that one L, chosen for q = 0, serves
    every q. It shortens the step: the server goes the 1 / (1 + mean of q L ||w_k - w||^2 / F_k)th part of the way to
    the mean of the w_k, both means weighted by p_k F_k^q. With q = 0 it is federated averaging with the weights p_k.

    L is 1/eta of the round by default (authors' code). Lengths are those of all parameters; buffers (running
    statistics) are averaged with the same weights. With ``finetune_epochs`` each client fine-tunes the final model.

    Server: model w. Client: nothing. Down: w, F_k, and the weight of F_k^q in units of the cohort's largest. Up: w_k
    and its part of sum_k h_k. Evaluated: w.

    References:
        Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning, ICLR 2020, Algorithm 2.
    """

    name: Literal["qfedavg"] = "qfedavg"
    citation: ClassVar[str] = "Li et al., ICLR 2020"
    no_privacy: ClassVar[str] = "its clients say how large their losses are, which become weights"
    no_private_norm: ClassVar[Mapping[str, str]] = {
        "all": "lengths of changes are of all parameters, of which some would never be sent"
    }

    fairness: float = setting(
        1.0, "q", "exponent of a client's loss in its weight; 0: federated averaging; large: the largest loss", ge=0
    )
    lipschitz: float | None = setting(
        None,
        "L",
        "Lipschitz constant of the gradients; null: 1/eta of the round; the smaller, the longer the server's step",
        gt=0,
        unless={"fairness": (0,)},
    )
    aggregation: Literal["uniform", "samples"] = setting(
        "uniform", "p_k", "weight of a client's objective: uniform 1/K, or its samples n_k / sum over all clients"
    )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        train = context.train
        if not self.fairness or self.lipschitz is not None or (train.optimizer == "sgd" and not train.momentum):
            return ()
        return (
            "algorithm.lipschitz is 1/train.lr, which makes a change a sum of gradients after plain SGD alone: with "
            "momentum or Adam set a smaller one",
        )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        if not self.fairness:
            return super().round(server, cohort, clients)
        model = server["model"]
        # the weights need all losses before anyone trains; a deployment's client would be visited once
        found = clients.map(self.loss_of, cohort, broadcast={"model": model}, counted=False)
        losses = [found[client]["loss"] for client in cohort]
        shares = clients.num_samples(cohort) if self.aggregation == "samples" else np.ones(len(cohort))
        weights = loss_weights(losses, self.fairness) * (shares / shares.max())
        payloads = {
            client: {"loss": loss, "weight": float(weight)}
            for client, loss, weight in zip(cohort, losses, weights, strict=True)
        }
        mean = clients.mean(self.fair_update, cohort, broadcast={"model": model}, payloads=payloads)
        here = parameters(model, clients.task)
        there = {name: mean["model"][name] for name in here}
        return {"model": {**mean["model"], **interpolate(here, there, 1 / mean["step"])}}

    async def loss_of(self, client: Client, model: Tree) -> Tree:
        """Returns F_k of the received model, and a little more: it is positive."""
        loss = (await client.score(Predictor.of(model))).loss + ADDED
        if loss <= 0:
            raise MethodError(
                f"q-FedAvg takes powers of losses, but that of client {client.id} is {loss:.3g}: it needs a task whose "
                "loss is not negative"
            )
        return {"loss": loss}

    async def fair_update(self, client: Client, model: Tree, loss: float, weight: float) -> Weighted:
        """Trains the received model; returns it with h_k / (L F_k^q).

        Args:
            client: who trains.
            model: w.
            loss: F_k(w).
            weight: p_k F_k(w)^q in units of the largest possible one.
        """
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        square = squared_distance(parameters(trained, client.task), parameters(model, client.task))
        step = 1 + self.fairness * self.constant(client.lr) / loss * float(square)
        return Weighted({"model": trained, "step": step}, weight)

    def constant(self, rate: float) -> float:
        """Returns L.

        Args:
            rate: eta of the round; at 0 nothing moves, and any number does.
        """
        if self.lipschitz is not None:
            return self.lipschitz
        return 1 / rate if rate else 1.0
