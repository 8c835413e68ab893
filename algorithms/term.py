"""TERM: federated averaging for a tilted mean of the clients' losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.mixture import parameters
from algorithms.parts.relative_weights import relative
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import function, loss
from rayfl.params import Tree, interpolate
from rayfl.tasks.base import Batch, Predictor, Task, Trait


class TERM(FineTuned):
    """TERM (tilted empirical risk minimization) over clients: one model for a tilted mean of their losses.

    The objective is

        R(w; t) = 1/t log sum_k p_k e^(t F_k(w))

    which is the mean of the F_k for t -> 0, the largest for t -> infinity, and the smallest for t -> -infinity. Its
    gradient is the mean of the clients' gradients with the weights p_k e^(t F_k). Client k of the cohort S says its
    loss F_k(w) at the received model w, over all its training samples and in evaluation mode, and trains w to w_k. The
    server takes

        w <- w + e^(m - E) sum_{k in S} q_k (w_k - w),    q_k = p_k e^(t F_k(w)) / sum_{j in S} p_j e^(t F_j(w))
        m = log( sum_{k in S} p_k e^(t F_k(w)) / sum_{k in S} p_k ),    e^E <- (1 - lambda) e^E + lambda e^m

    where E, at first m, estimates t R over all clients from the cohorts so far. With lambda = 1 it is m, and the server
    goes to the mean of the w_k with the weights q_k. t = 0 is federated averaging with the weights p_k.

    With ``sample_tilt`` tau clients minimise a tilted mean over samples, too (hierarchical tilting), over mini-batches

        1/tau log mean e^(tau CE)

    and F_k is that of all their samples. Buffers (running statistics) are averaged with the weights q_k. With
    ``finetune_epochs`` each client fine-tunes the final model on the cross-entropy.

    Server: model w; with lambda < 1 E. Client: nothing. Down: w, and the weight p_k e^(t F_k) in units of the cohort's
    largest. Up: w_k. Evaluated: w.

    References:
        Li, Beirami, Sanjabi, Smith: Tilted Empirical Risk Minimization, ICLR 2021; On Tilted Losses in Machine
        Learning: Theory and Applications, JMLR 2023 (tilting, hierarchical tilting, stochastic estimates).
    """

    name: Literal["term"] = "term"
    citation: ClassVar[str] = "Li et al., ICLR 2021"
    no_privacy: ClassVar[str] = "its clients say how large their losses are, which become weights"

    tilt: float = setting(
        1.0,
        "t",
        "tilt over clients; 0: federated averaging; large: the largest loss (fairness); negative: the smallest losses "
        "(robustness)",
    )
    estimate_share: float = setting(
        1.0,
        "lambda",
        "share of the cohort in the estimate of the tilted mean; 1: the cohort alone, so that weights sum to 1; 0.5: "
        "authors' code",
        gt=0,
        le=1,
        unless={"tilt": (0,)},
    )
    sample_tilt: float = setting(0.0, "tau", "tilt over a client's samples; 0: the mean of their losses")
    aggregation: Literal["uniform", "samples"] = setting(
        "uniform", "p_k", "weight of a client's objective: uniform, or its samples n_k"
    )

    def needed(self) -> Mapping[Trait, str]:
        return {"classes": "sample_tilt weighs the cross-entropy of single samples"} if self.sample_tilt else {}

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        if not self.tilt:
            return super().round(server, cohort, clients)
        model = server["model"]
        # the weights need all losses before anyone trains; a deployment's client would be visited once
        found = clients.map(self.loss_of, cohort, broadcast={"model": model}, counted=False)
        shares = clients.num_samples(cohort) if self.aggregation == "samples" else np.ones(len(cohort))
        logs = self.tilt * np.array([found[client]["loss"] for client in cohort]) + np.log(shares / shares.sum())
        weights = relative(logs)
        payloads = {client: {"weight": float(weight)} for client, weight in zip(cohort, weights, strict=True)}
        mean = clients.mean(self.tilted_update, cohort, broadcast={"model": model}, payloads=payloads)
        if self.estimate_share == 1:
            return {"model": mean}
        level = float(np.logaddexp.reduce(logs))
        before = server.get("estimate", level)
        share = self.estimate_share
        estimate = float(np.logaddexp(math.log1p(-share) + before, math.log(share) + level))
        here = parameters(model, clients.task)
        there = {name: mean[name] for name in here}
        moved = interpolate(here, there, math.exp(level - estimate))
        return {"model": {**mean, **moved}, "estimate": estimate}

    async def loss_of(self, client: Client, model: Tree) -> Tree:
        """Returns F_k of the received model."""
        if not self.sample_tilt:
            return {"loss": (await client.score(Predictor.of(model))).loss}
        rows = await client.outputs(lambda x, task: task.predictions([model], x))
        labels = client.examples().y
        losses = -rows.gather(1, labels[:, None])[:, 0].double()
        return {"loss": float(log_mean(self.sample_tilt * losses)) / self.sample_tilt}

    async def tilted_update(self, client: Client, model: Tree, weight: float) -> Weighted:
        """Trains the received model.

        Args:
            client: who trains.
            model: w.
            weight: p_k e^(t F_k(w)) in units of the largest of the cohort.
        """
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return Weighted(trained, weight)

    @property
    def objective(self) -> Any:
        """CE, or its tilted mean over the mini-batch."""
        return function(self.tilted_loss) if self.sample_tilt else loss()

    def tilted_loss(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """1/tau log mean e^(tau CE), a scalar."""
        losses = F.cross_entropy(task.logits(model, batch), batch.y, reduction="none")
        return log_mean(self.sample_tilt * losses, batch.mask) / self.sample_tilt


def log_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """log mean e^v, a scalar.

    Args:
        values: v, shape (n,).
        mask: 1 for the values that count, else 0, shape (n,); None: all count.
    """
    if mask is None:
        return values.logsumexp(0) - math.log(len(values))
    return torch.where(mask > 0, values, -torch.inf).logsumexp(0) - mask.sum().log()
