"""FairFed: federated averaging whose weights follow how fair the model is at each client, to groups of people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.people import check_people, groups_of, train_weighted
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.examples import Examples
from rayfl.metrics.people import cells, rates
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task, Trait

GROUPS = 2
"""A gap between two groups has a sign, by which a client and all together can differ in who is favoured."""


def gaps(counts: np.ndarray, metric: str) -> np.ndarray:
    """Delta_k: how far what a client finds of a model is from what all clients together find.

    Args:
        counts: samples by client, group, label and predicted class, shape (S, 2, 2, 2).
        metric: ``equal_opportunity`` or ``statistical_parity``.

    Returns:
        Of shape (S,): of the metric, a difference between the rates of the groups; where it is undefined, of the
        accuracy.
    """
    together = counts.sum(0)
    fair = np.abs(_favour(counts, metric) - _favour(together, metric))
    accurate = np.abs(_accuracy(counts) - _accuracy(together))
    found: np.ndarray = np.where(np.isnan(fair), accurate, fair)
    return found


def _favour(counts: np.ndarray, metric: str) -> np.ndarray:
    """The rate at which 1 is predicted for the first group, less that of the second; nan without such samples."""
    every, _, right = rates(counts)
    rate = right if metric == "equal_opportunity" else every
    found: np.ndarray = rate[..., 0] - rate[..., 1]
    return found


def _accuracy(counts: np.ndarray) -> np.ndarray:
    found: np.ndarray = (counts[..., 0, 0].sum(-1) + counts[..., 1, 1].sum(-1)) / counts.sum((-3, -2, -1))
    return found


def reweighed(examples: Examples) -> np.ndarray:
    """Weights of samples under which group and label are independent (Kamiran and Calders, 2012, section 4.2).

    Args:
        examples: n samples with groups and classes.

    Returns:
        By sample P(a) P(y) / P(a, y), shares among the n samples, float64 of shape (n,).
    """
    assert examples.group is not None
    group, y = examples.group.cpu().numpy(), examples.y.cpu().numpy()
    people, own, of_group = np.unique(group, return_inverse=True, return_counts=True)
    labels, label, of_label = np.unique(y, return_inverse=True, return_counts=True)
    together = np.zeros((len(people), len(labels)))
    np.add.at(together, (own, label), 1)
    weights: np.ndarray = of_group[own] * of_label[label] / (len(y) * together[own, label])
    return weights


class FairFed(FineTuned):
    """FairFed: federated averaging in which clients count less, the further their fairness is from that of all.

    F is a difference between two groups of people, first less second, of the rates at which 1 is predicted: among the
    samples with the label 1 (equal opportunity) or all (statistical parity). Client k of the cohort S finds it for the
    received model w on its training samples, as all of S together do:

        Delta_k = |F_k(w) - F(w)|,  or |Acc_k(w) - Acc(w)| where F_k or F is undefined
        d_k <- d_k - beta (Delta_k - 1/|S| sum_{j in S} Delta_j)
        w <- sum_{k in S} q_k w_k / sum_{k in S} q_k,    q_k = max(n_k / n + d_k, 0)

    with d_k = 0 at first, n_k training samples, and n those of all clients. With ``reweighing`` a client trains w to
    w_k on the mean of

        P(a) P(y) / P(a, y) CE(x, y)

    over its samples (x, y) from people of the group a, with the shares P of its own training samples: under these
    weights group and label are independent. With beta = 0 this is local reweighing alone, and with neither federated
    averaging. With ``finetune_epochs`` each client fine-tunes the final model on the cross-entropy.

    Server: model w, d. Client: nothing. Down: w, and q_k. Up: numbers of samples by group, label and prediction, and
    w_k. Evaluated: w.

    References:
        Ezzeldin, Yan, He, Ferrara, Avestimehr: FairFed: Enabling Group Fairness in Federated Learning, AAAI 2023.
        Kamiran, Calders: Data preprocessing techniques for classification without discrimination, Knowledge and
        Information Systems 33, 2012.
    """

    name: Literal["fairfed"] = "fairfed"
    citation: ClassVar[str] = "Ezzeldin et al., AAAI 2023"
    server_keeps: ClassVar[str] = "w, d"
    no_privacy: ClassVar[str] = "its clients say how a model treats groups of their people, from which weights are made"
    needs: ClassVar[Mapping[Trait, str]] = {
        "classes": "it compares how often a class is predicted for groups of people",
        "distribution": "it weighs the cross-entropy of samples",
    }

    beta: float = setting(
        1.0, "beta", "step of the weights along the gaps, in units of n_k / n; 0: weights stay n_k", ge=0
    )
    metric: Literal["equal_opportunity", "statistical_parity"] = setting(
        "equal_opportunity", "F", "which difference between the groups is compared", unless={"beta": (0,)}
    )
    aggregation: Literal["samples"] = setting("samples", "n_k", "where the weights of clients begin: at their samples")
    reweighing: bool = setting(
        True, "", "whether clients train on samples weighted so that group and label are independent"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_people(task, "FairFed", two_groups=True)

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {**super().init(task, context), "moved": torch.zeros(context.num_clients, dtype=torch.float64)}

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, dict[int, Tree]]:
        return {"model": server["model"]}, {}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, moved, members = server["model"], server["moved"].numpy().copy(), list(cohort)
        if self.beta:
            found = clients.map(self.treated, cohort, broadcast={"model": model})
            counts = np.stack([found[client]["counts"].numpy() for client in cohort]).astype(np.float64)
            apart = gaps(counts.reshape(-1, GROUPS, 2, 2), self.metric)
            moved[members] -= self.beta * (apart - apart.mean())
        samples = clients.num_samples(range(clients.context.num_clients))
        shares = samples / samples.sum()
        weights = np.maximum(shares + moved, 0)[members]
        if not weights.any():
            weights = shares[members]
        payloads = {
            client: {"weight": float(weight)} for client, weight in zip(cohort, weights, strict=True) if weight > 0
        }
        mean = clients.mean(self.weighed_update, list(payloads), broadcast={"model": model}, payloads=payloads)
        return {"model": mean, "moved": torch.from_numpy(moved)}

    async def treated(self, client: Client, model: Tree) -> Tree:
        """Returns a client's training samples by group, label and predicted class, shape (8,); exact below 2^24."""
        predictor, samples = Predictor.of(model), client.examples()
        built = predictor.built()
        rows = await client.outputs(lambda x, task: predictor.predictions(built, x, task))
        entered = cells(groups_of(samples, "FairFed"), (samples.y == 1).long(), (rows.argmax(1) == 1).long(), GROUPS)
        return {"counts": entered.sum(0).to(rows.dtype).cpu()}

    async def weighed_update(self, client: Client, model: Tree, weight: float) -> Weighted:
        """Trains the received model; its weight in the mean is q_k."""
        if self.reweighing:
            trained = await train_weighted(client, model, reweighed(client.examples()))
        else:
            trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return Weighted(trained, weight)
