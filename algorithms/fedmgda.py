"""FedMGDA+: the server steps along the shortest mean of the clients' updates, which helps each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch

from algorithms.base import Clients, setting
from algorithms.parts.finetuning import FineTuning
from algorithms.parts.least_norm import least_norm_weights
from algorithms.parts.simplex import Array
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.robust import combined
from rayfl.engine.client import Client
from rayfl.params import Tree, leaves
from rayfl.tasks.base import Predictor


class FedMGDA(FineTuning):
    """FedMGDA+: every client's loss is an objective of its own, and the server takes a step that is good for all.

    With g_k = w_k - w, the update of client k of the cohort, and lambda_0 the weights of federated averaging, the
    server finds the weights of the shortest mean of the updates' directions,

        lambda = argmin || sum_k lambda_k h_k ||,    h_k = g_k / ||g_k||
        lambda_k >= 0,    sum_k lambda_k = 1,    |lambda_k - lambda_0k| <= epsilon for all k

    and goes along that mean,

        w <- w + eta sum_k lambda_k h_k

    With epsilon = 1 the step turns away from no update: its inner product with each h_k is ||sum_k lambda_k h_k||^2 at
    least, which is 0 only where the updates have no common direction, and w stays. With epsilon = 0 the weights are
    lambda_0. A client that has not moved has h_k = 0. Without ``normalize`` h_k is g_k. Products are over all
    parameters that are sent, in float64; buffers (running statistics) are averaged with the weights lambda.

    Server: model w. Client: nothing. Down: w. Up: w_k, and n_k. Evaluated: w (``global``), and with ``finetune_epochs``
    w fine-tuned by each client.

    References:
        Hu, Shaloudegi, Zhang, Yu: Federated Learning Meets Multi-objective Optimization, IEEE Transactions on Network
        Science and Engineering 2022 (arXiv 2006.11489).
    """

    name: Literal["fedmgda"] = "fedmgda"
    citation: ClassVar[str] = "Hu et al., TNSE 2022"
    no_privacy: ClassVar[str] = "its server reads the direction of each message, which noise on a sum does not hide"
    own_rule: ClassVar[str] = "it looks for the shortest mean of the messages"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples",
        "lambda_0",
        "weights that the server starts from: samples n_k / sum over the cohort; uniform 1/|S|",
        unless={"tolerance": (1,)},
    )
    tolerance: float = setting(
        0.1, "epsilon", "how far a weight may be from that one; 0: not at all; 1: any weights (MGDA)", ge=0, le=1
    )
    normalize: bool = setting(True, "", "whether all updates have the length 1, so that none counts by its size")
    server_lr: float = setting(1.0, "eta", "step along the mean", gt=0)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, names = server["model"], clients.task.network.parameter_names
        sent = clients.each(self.local_update, cohort, {"model": model})
        models = [message.tree for message in sent.values()]
        shares = np.array([float(message.weight) for message in sent.values()])
        start = {name: model[name] for name in names if name in models[0]}
        products = update_products(models, start)
        lengths = np.sqrt(np.diag(products)) if self.normalize else np.ones(len(models))
        factors = np.divide(1, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        scaled = products * np.outer(factors, factors)
        weights = least_norm_weights(scaled, shares / shares.sum(), self.tolerance)
        moved = combined(
            [{name: one[name] for name in start} for one in models],
            start,
            torch.from_numpy(self.server_lr * weights * factors),
        )
        rest = {name: leaf for name, leaf in model.items() if name not in start}
        others = [{name: one[name] for name in rest} for one in models]
        return {"model": {**model, **moved, **(combined(others, rest, torch.from_numpy(weights)) if rest else {})}}

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the received model."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return Weighted(trained, 1 if self.aggregation == "uniform" else client.num_samples)


def update_products(models: Sequence[Tree], start: Tree) -> Array:
    """Inner products of the changes w_k - w, float64 of shape (m, m).

    Args:
        models: w_k, m trees that have the parameters.
        start: w, the parameters.
    """
    found = torch.zeros(len(models), len(models), dtype=torch.float64)
    for name, leaf in leaves(start):
        changes = torch.stack([(model[name].double() - leaf.double()).flatten().cpu() for model in models])
        found += changes @ changes.T
    return found.numpy()
