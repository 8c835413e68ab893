"""FedNova: local changes are divided by how much gradient each client applied before they are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.partial import part, separated
from algorithms.parts.proximity import proximity
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, loss
from rayfl.params import Tree, add_scaled, interpolate, map_leaves, subtract, zeros_like
from rayfl.tasks.base import Predictor, Task


def normalizer(steps: int, momentum: float = 0.0, pull: float = 0.0) -> float:
    """||a||_1: how much gradient some local steps apply in all, in units of the learning rate.

    Args:
        steps: tau, local steps.
        momentum: of the gradients.
        pull: eta mu, the share of the way to the received model that each step takes back, after momentum.
    """
    velocity = applied = 0.0
    for _ in range(steps):
        velocity = momentum * velocity + 1
        applied = (1 - pull) * applied + velocity
    return applied


def overshoot(shares: np.ndarray, applied: np.ndarray, effective: np.ndarray) -> float:
    """s, how far the server steps towards the mean of the models with weights p_k / ||a_k||.

    Args:
        shares: p_k, which sum to 1.
        applied: ||a_k||_1, positive.
        effective: what tau_eff is the mean of, ||a_k||_1 or tau_k.

    Returns:
        tau_eff sum_k p_k / ||a_k||; with ||a_k|| for both at least 1, and 1 exactly if all are equal.
    """
    if effective.min() == effective.max() and applied.min() == applied.max():
        return float(effective[0] / applied[0])
    return float((shares @ effective) * (shares @ (1 / applied)))


class FedNova(FineTuned):
    """FedNova: federated averaging of normalised changes, so that clients of many local steps do not weigh more.

    A client's local update changes the model by x_k - w = -eta sum_j a_kj g_kj, a sum of its gradients. The server
    divides by ||a_k||_1 and takes

        w + tau_eff sum_k p_k (x_k - w) / ||a_k||,    tau_eff = sum_k p_k ||a_k||

    with p_k = n_k over the samples of the cohort. For SGD ||a_k|| is the number of local steps tau_k, with momentum
    rho sum_{i=1..tau_k} (1 - rho^i) / (1 - rho), with ``proximal_weight`` mu (FedProx) (1 - (1 - eta mu)^tau_k) /
    (eta mu). If all are equal it is federated averaging. With ``server_momentum`` the server steps along
    b <- gamma b + (its step) / eta. Buffers (running statistics) have no gradient: they are averaged with the weights
    p_k / ||a_k||.

    Server: model w, with ``server_momentum`` also b. Client: nothing. Down: w, and the largest ||a_k||, in units of
    which a client weighs its model. Up: x_k and n_k.

    References:
        Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated
        Optimization, NeurIPS 2020, eqs. 3-7 and Algorithm 1.
    """

    name: Literal["fednova"] = "fednova"
    citation: ClassVar[str] = "Wang et al., NeurIPS 2020"
    no_example_privacy: ClassVar[str] = ""
    no_privacy: ClassVar[str] = "its clients send changes by their steps, weighted by how many those are"
    server_keeps: ClassVar[str] = "w, b"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "p_k", "weights of the changes: samples n_k / sum over the cohort, or uniform 1/|S|"
    )
    effective_steps: Literal["normalizer", "steps"] = setting(
        "normalizer",
        "tau_eff",
        "the mean of ||a_k||, or of the numbers of local steps tau_k (the authors' code with a proximal term)",
    )
    proximal_weight: float = setting(0.0, "mu", "weight of FedProx's term in the local loss", ge=0)
    server_momentum: float = setting(0.0, "gamma", "momentum of the server", ge=0, lt=1)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        train = context.train
        unfit = {
            "train.optimizer=sgd": train.optimizer != "sgd",
            "train.nesterov=false": train.nesterov,
            "train.dampening=0": train.dampening > 0,
            "train.max_grad_norm=null": train.max_grad_norm is not None,
            "train.persist_optimizer=false": train.persist_optimizer and train.momentum > 0,
        }
        needed = " ".join(option for option, violated in unfit.items() if violated)
        if needed:
            raise ConfigError(
                f"FedNova divides by how much gradient plain SGD applies, with or without momentum: set {needed}"
            )
        if self.proximal_weight and train.momentum:
            raise ConfigError(
                "FedNova's proximal term is no part of the momentum, but that of the training section is: set "
                "train.momentum=0 or algorithm.proximal_weight=0"
            )
        fastest = max(train.lr_in(t) for t in range(context.rounds))
        if self.proximal_weight * fastest >= 1:
            raise ConfigError(
                f"algorithm.proximal_weight {self.proximal_weight} times the learning rate {fastest} is not below 1, "
                "so that a step's pull overshoots the received model: lower one of the two"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.effective_steps == "steps" and not context.train.momentum and not self.proximal_weight:
            return ("algorithm.effective_steps has no effect: without momentum and a proximal term both are equal",)
        return ()

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        if not self.server_momentum:
            return server
        return {**server, "momentum": zeros_like(part(server["model"], task.network.parameter_names))}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        context, model = clients.context, server["model"]
        samples = clients.num_samples(cohort)
        pairs = zip(cohort, samples.tolist(), strict=True)
        steps = np.array([context.steps_of(client, int(n)) for client, n in pairs], dtype=float)
        applied = np.array([self.applied(context, int(tau)) for tau in steps])
        largest = float(applied.max())
        mean = clients.mean(self.normalized_update, cohort, broadcast={"model": model, "largest": largest})
        target, buffers = mean["parameters"], mean.get("buffers", {})
        start = part(model, target)
        weights = samples if self.aggregation == "samples" else np.ones(len(cohort))
        effective = applied if self.effective_steps == "normalizer" else steps
        # without local steps nothing was applied, and there is nothing to divide
        scale = overshoot(weights / weights.sum(), applied, effective) if largest else 1.0
        moved = interpolate(start, target, scale)
        changed: Tree = {}
        if self.server_momentum:
            moved, changed["momentum"] = self.pushed(start, moved, server["momentum"], context)
        return {"model": part({**moved, **buffers}, model), **changed}

    def applied(self, context: RoundContext, steps: int) -> float:
        """||a_k||_1 of a client that takes some local steps in this round."""
        train = context.train
        return normalizer(steps, train.momentum, self.proximal_weight * train.lr_in(context.round))

    def pushed(self, start: Tree, moved: Tree, momentum: Tree, context: RoundContext) -> tuple[Tree, Tree]:
        """The parameters with what earlier rounds' steps add to this one's, and the new momentum."""
        rate = context.train.lr_in(context.round)
        kept = map_leaves(lambda leaf: leaf * self.server_momentum, momentum)
        newest = add_scaled(kept, subtract(moved, start), 1 / rate) if rate else kept
        return add_scaled(moved, kept, rate), newest

    async def normalized_update(self, client: Client, model: Tree, largest: float) -> Weighted:
        """Trains the received model; its weight is the client's share in units of the largest ||a_k||."""
        trained = await client.train(model, self.objective, frozen={"received": model})
        client.publish(local=Predictor.of(trained))
        applied = self.applied(client.context, client.num_steps())
        share = 1 if self.aggregation == "uniform" else client.num_samples
        tree = separated(trained, client.task.network)
        # where all apply as much gradient the weights are the integers of federated averaging
        return Weighted(tree, share if applied in (0, largest) else share * largest / applied)

    @property
    def objective(self) -> Any:
        """CE + mu/2 ||x - w||^2."""
        return loss() + self.proximal_weight * proximity("half_squared", TRAINED, "received")

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        return super().update(trained["parameters"], received, task)
