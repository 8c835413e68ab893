"""FedDisco: clients count less the farther the frequencies of their classes are from equal ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import scipy
import torch

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.prototypes import class_counts
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task, Trait

Metric = Literal["kl", "l1", "l2", "cosine"]


class FedDisco(FineTuned):
    """FedDisco (discrepancy-aware collaboration): federated averaging that counts clients by their classes, too.

    Let D_k be the frequencies of the classes among client k's n_k training samples, T those of C equally frequent
    classes, and d_k the discrepancy of D_k from T. The server takes the mean over the cohort S with the weights

        p_k = ReLU(q_k - a d_k + b) / sum_{j in S} ReLU(q_j - a d_j + b),    q_k = n_k / sum_{j in S} n_j

    The discrepancy is KL(D_k || T), in units of the sum over the cohort; or ||D_k - T||_1, ||D_k - T||_2 or
    1 - cos(D_k, T) as they are (``metric``). A client of weight 0 does not train. Where no weight is above 0, p_k is
    q_k. With a = b = 0 it is federated averaging. With ``finetune_epochs`` each client fine-tunes the final model.

    Server: model w, and d_k of the clients that have taken part. Client: nothing. Down: p_k, up to a factor, and w.
    Up: d_k before a client's first training (with a = 0 never), and w_k. Evaluated: w (``global``).

    References:
        Ye, Xu, Wang, Xu, Chen, Wang: FedDisco: Federated Learning with Discrepancy-Aware Collaboration, ICML 2023
        (arXiv 2305.19229).
    """

    name: Literal["feddisco"] = "feddisco"
    citation: ClassVar[str] = "Ye et al., ICML 2023"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "it compares how frequent the classes are"}
    no_privacy: ClassVar[str] = "its clients say how frequent their classes are, which becomes weights"
    server_keeps: ClassVar[str] = "w, d_k"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "what discrepancies are taken off: samples n_k / sum over the cohort, or uniform 1/|S|"
    )
    discrepancy_weight: float = setting(0.5, "a", "weight of the discrepancy", ge=0)
    offset: float = setting(0.1, "b", "what each client has in addition", ge=0)
    metric: Metric = setting(
        "kl",
        "d",
        "discrepancy: kl (divergence from T, the cohort's sum is 1), l1 or l2 (distances), cosine (1 less that)",
        unless={"discrepancy_weight": (0,)},
        kept=True,
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        unknown = torch.full((context.num_clients,), -1.0, dtype=torch.float64)
        return {**super().init(task, context), "discrepancies": unknown}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        known = server["discrepancies"]
        asked = [client for client in cohort if self.discrepancy_weight and known[client] < 0]
        if asked:
            replies = clients.map(self.describe, asked, {})
            found = torch.tensor([replies[client]["discrepancy"] for client in asked], dtype=torch.float64)
            known = known.index_copy(0, torch.tensor(asked), found)
        sizes = np.ones(len(cohort)) if self.aggregation == "uniform" else clients.num_samples(cohort)
        weights = self.weights(sizes, known[list(cohort)].clamp(min=0).numpy())
        # who counts nothing need not train
        payloads = {client: {"weight": float(p)} for client, p in zip(cohort, weights, strict=True) if p > 0}
        sent = {"model": server["model"]}
        return {"model": clients.mean(self.weighted_update, [*payloads], sent, payloads), "discrepancies": known}

    def weights(self, sizes: np.ndarray, discrepancies: np.ndarray) -> np.ndarray:
        """p_k up to a factor, float64, shape (|S|,).

        Args:
            sizes: n_k, or ones, shape (|S|,).
            discrepancies: d_k, shape (|S|,).
        """
        shares = sizes / max(sizes.sum(), 1)
        if self.metric == "kl" and discrepancies.any():
            discrepancies = discrepancies / discrepancies.sum()
        found: np.ndarray = np.maximum(shares - self.discrepancy_weight * discrepancies + self.offset, 0)
        return found if found.any() else shares

    async def describe(self, client: Client) -> Tree:
        """Returns d_k."""
        counts = class_counts(client.examples().y, client.task.network.head_shape[0])
        return {"discrepancy": discrepancy(np.array(counts.tolist()), self.metric)}

    async def weighted_update(self, client: Client, model: Tree, weight: float) -> Weighted:
        """Trains the received model.

        Args:
            client: who trains.
            model: w.
            weight: p_k up to a factor.
        """
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return Weighted(trained, weight)

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}


def discrepancy(counts: np.ndarray, metric: Metric) -> float:
    """How far frequencies are from equal ones, 0 or more; 0 without samples.

    Args:
        counts: samples by class, shape (C,).
        metric: of the two.
    """
    if not counts.any():
        return 0.0
    shares, even = counts / counts.sum(), np.full(len(counts), 1 / len(counts))
    if metric == "kl":
        return float(scipy.special.rel_entr(shares, even).sum())
    if metric == "cosine":
        return float(1 - shares @ even / (np.linalg.norm(shares) * np.linalg.norm(even)))
    return float(np.linalg.norm(shares - even, ord=1 if metric == "l1" else 2))
