"""FedVARP: the server keeps the last change of each client, and corrects the mean of those that are there by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.means import mean_of
from algorithms.parts.mixture import parameters
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree, add_scaled, interpolate, map_leaves, subtract, weighted_sum
from rayfl.tasks.base import Task


class FedVARP(FineTuned):
    """FedVARP (variance reduction for partial participation): changes of clients that are not there stand in for them.

    With Delta_i = x_i - w, the change of the model of client i in the cohort S, and y_i the last change that the server
    has had of client i, zero before the first, of K clients, it takes

        v = sum_{i in S} q_i (Delta_i - y_i) + sum_{j=1..K} Q_j y_j
        w <- w + eta_g v,    y_i <- Delta_i  for i in S

    q_i are the weights of the cohort, Q_j those of all clients. Clients do what they do in federated averaging.
    With ``clusters`` it is ClusterFedVARP: the clients of a cluster c share one y_c, which becomes the mean of Delta_i
    over the clients of S in that cluster, and stays where there are none.

    With one cluster, or with all clients in every round, it is federated averaging. Buffers (running statistics) are
    averaged over S. With ``finetune_epochs`` each client fine-tunes the final model.

    Server: model w, the y_i, and their mean. Client: nothing. Down: w. Up: x_i and n_i. Evaluated: w (``global``).

    References:
        Jhunjhunwala, Sharma, Nagarkatti, Joshi: FedVARP: Tackling the Variance Due to Partial Client Participation in
        Federated Learning, UAI 2022 (arXiv:2207.14130), FedVARP and ClusterFedVARP.
    """

    name: Literal["fedvarp"] = "fedvarp"
    citation: ClassVar[str] = "Jhunjhunwala et al., UAI 2022"
    no_privacy: ClassVar[str] = "its server keeps each client's last change, and uses it in later rounds"
    server_keeps: ClassVar[str] = "w, y_1..y_K"
    keeps_models: ClassVar[bool] = True

    server_lr: float = setting(1.0, "eta_g", "step of the server along v", gt=0)
    clusters: int | None = setting(
        None, "", "clusters of clients that share one y (ClusterFedVARP); null: each has its own", ge=1, kept=True
    )
    assignment: Literal["blocks", "in_turn", "random"] = setting(
        "blocks",
        "",
        "which clients belong to a cluster: as many consecutive ones each (so are groups and domains numbered), every "
        "one that is as far from the last, or drawn at random by the seed, as many each",
        unless={"clusters": (None, 1)},
        kept=True,
    )
    aggregation: Literal["uniform", "samples"] = setting(
        "uniform", "q_i", "weights of both means: uniform 1/|S| and 1/K (paper); samples n_i / their sum", kept=True
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.clusters is not None and self.clusters > context.num_clients:
            raise ConfigError(
                f"algorithm.clusters is {self.clusters}, but only {context.num_clients} clients take part in training: "
                "lower it, or set it to null for one y of each client"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.clusters != 1 and context.smallest_cohort < context.num_clients:
            return ()
        why = "there is one cluster" if self.clusters == 1 else "all clients take part in every round"
        return (f"{why}, so that this is federated averaging",)

    def kept_of_client(self, task: Task, clients: int) -> int:
        whole = super().kept_of_client(task, clients)
        return whole if self.clusters is None else -(-whole * self.clusters // clients)

    def clusters_of(self, context: RoundContext) -> list[str]:
        """Returns the cluster of each client, as a key of the server's ``changes``."""
        numbers = np.arange(context.num_clients)
        if self.clusters is None:
            return [str(client) for client in numbers.tolist()]
        found = numbers % self.clusters if self.assignment == "in_turn" else numbers * self.clusters // len(numbers)
        if self.assignment == "random":
            found = context.streams.generator("clusters").permutation(found)
        return [str(cluster) for cluster in found.tolist()]

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        # in float64, so that what rounds add to it and take away from it leaves nothing behind
        zeros = map_leaves(lambda leaf: torch.zeros_like(leaf, dtype=torch.float64), parameters(server["model"], task))
        return {**server, "mean": zeros}

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model, kept, everything = server["model"], server.get("changes", {}), server["mean"]
        cluster_of = self.clusters_of(clients.context)
        messages = clients.each(self.local_update, cohort, self.sent(server))
        mean = mean_of(list(messages.values()))
        start, end = ({name: tree[name] for name in everything} for tree in (model, mean))

        weights = {client: message.weight for client, message in messages.items()}
        there = {client: weight for client, weight in weights.items() if cluster_of[client] in kept}
        correction = everything
        if there:
            old = [_double(kept[cluster_of[client]]) for client in there]
            shares = [weight / sum(weights.values()) for weight in there.values()]
            correction = subtract(everything, weighted_sum(old, shares))
        moved = interpolate(start, end, self.server_lr)
        moved = map_leaves(lambda w, c: w + self.server_lr * c.to(w.dtype), moved, correction)

        renewed: Tree = {}
        shares_of = self.shares(cluster_of, clients)
        for cluster in dict.fromkeys(cluster_of[client] for client in messages):
            members = [message for client, message in messages.items() if cluster_of[client] == cluster]
            ends = mean_of(members) if len(members) > 1 else members[0].tree
            renewed[cluster] = subtract({name: ends[name] for name in everything}, start)
            everything = add_scaled(everything, _double(renewed[cluster]), shares_of[cluster])
            if cluster in kept:
                everything = add_scaled(everything, _double(kept[cluster]), -shares_of[cluster])
        return {"model": {**mean, **moved}, "changes": {**kept, **renewed}, "mean": everything}

    def shares(self, cluster_of: Sequence[str], clients: Clients) -> dict[str, float]:
        """The sum of Q_j over the clients of each cluster.

        Args:
            cluster_of: the cluster of each client.
            clients: have the numbers of samples.
        """
        uniform, everyone = self.aggregation == "uniform", range(len(cluster_of))
        weights = [1] * len(cluster_of) if uniform else clients.num_samples(everyone).tolist()
        found: Counter[str] = Counter()
        for cluster, weight in zip(cluster_of, weights, strict=True):
            found[cluster] += weight
        whole = sum(weights)
        return {cluster: weight / whole for cluster, weight in found.items()}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return self.sent(server), {}


def _double(tree: Tree) -> Tree:
    return map_leaves(lambda leaf: leaf.double(), tree)
