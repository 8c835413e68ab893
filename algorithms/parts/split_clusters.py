"""Clusters of clients that are split in two whenever federated averaging has converged for their mean, not for them."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, check_everyone, setting
from algorithms.parts.clusters import fitting_model
from algorithms.parts.kept_models import largest_model
from algorithms.parts.means import mean_of
from algorithms.parts.partial import joined, part, separated
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import TINY, Tree, subtract
from rayfl.tasks.base import Predictor, Task

Split = tuple[list[int], list[int]]
"""Positions of a cluster's members in two groups, the first one with position 0; both ascending."""


def gram(changes: Sequence[Tree]) -> Tensor:
    """Inner products of trees as one vector each, tensor by tensor; float64 of shape (m, m)."""
    total = torch.zeros(len(changes), len(changes), dtype=torch.float64)
    for name in changes[0]:
        rows = torch.stack([change[name].flatten() for change in changes]).double()
        total += rows @ rows.T
    return total


def cosines(products: Tensor) -> Tensor:
    """Cosines of the vectors with these inner products, 0 where one of them is zero."""
    norms = products.diagonal().clamp(min=0).sqrt()
    return products / (norms[:, None] * norms).clamp(min=TINY)


class SplitClusters(Algorithm):
    """All clients make the update of federated averaging from their cluster's model; the server splits clusters.

    A cluster may be split if its mean change is shorter than ``mean_norm`` while a member's is longer than
    ``max_norm``. Each of the two groups takes the cluster's model and the mean of its own members' changes, in the same
    round. Norms are those of parameters; buffers (running statistics) are averaged. A cluster is split once a round at
    most.

    A method defines :meth:`bipartition`, and may keep what it needs for that in :meth:`remembered`.
    """

    personalized: ClassVar[str] = "personalized"
    server_keeps: ClassVar[str] = "w_c, clusters"
    newcomer: ClassVar[str] = "the model of the cluster that fits it best"
    kept_on_server: ClassVar[str] = "a model of each cluster (as many as clients, at most)"

    mean_norm: float = setting(0.4, "eps_1", "a cluster may be split if its mean change is shorter; 0: never", ge=0)
    max_norm: float = setting(1.6, "eps_2", "and if a member's change is longer", ge=0, unless={"mean_norm": (0,)})
    split_from: int = setting(20, "", "rounds before the first split", ge=0, unless={"mean_norm": (0,)})
    min_size: int = setting(2, "", "clusters of this size or smaller are not split", ge=1, unless={"mean_norm": (0,)})
    aggregation: Literal["uniform", "samples"] = setting(
        "uniform", "q_k", "weights of a cluster's mean: uniform (authors' code), or samples n_k (paper)"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_everyone(f"{type(self).__name__} compares the changes of all clients", context)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.split_from < context.rounds:
            return ()
        return (
            f"the clients stay one cluster: algorithm.split_from is {self.split_from}, but the run has "
            f"{context.rounds} rounds",
        )

    def kept_bytes(self, task: Task, context: RoundContext, samples: int) -> int:
        """See :class:`KeptModels`; the number of clusters at most doubles in a round."""
        splits = max(context.rounds - self.split_from, 0) if self.mean_norm else 0
        clusters = min(context.num_clients, 1 << min(splits, context.num_clients.bit_length()))
        return clusters * largest_model(task)

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        return {
            "models": {"0": model},
            "clusters": {str(client): 0 for client in range(context.num_clients)},
        }

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        models, clusters = dict(server["models"]), dict(server["clusters"])
        payloads = {client: {"model": models[str(clusters[str(client)])]} for client in cohort}
        trained = clients.map(self.local_update, cohort, broadcast={}, payloads=payloads)
        past = self.remembered(server, payloads, trained)
        samples = dict(zip(cohort, clients.num_samples(cohort).tolist(), strict=True))
        weights = {client: 1 if self.aggregation == "uniform" else n for client, n in samples.items()}
        for number, model in list(models.items()):
            members = [int(client) for client, cluster in clusters.items() if str(cluster) == number]
            present = [client for client in members if client in trained]
            groups = [present]
            # a client that was left out of the round cannot be assigned to one of two groups
            if present == members and clients.context.round >= self.split_from:
                parameters = [trained[client]["parameters"] for client in members]
                changes = [subtract(one, part(model, one)) for one in parameters]
                split = self.groups(members, changes, [weights[client] for client in members], past)
                groups = [[members[i] for i in group] for group in split]
                past = past if len(groups) == 1 else self.forgotten(past, members)
            for group, child in zip(groups, (number, str(len(models))), strict=False):
                clusters.update({str(client): int(child) for client in group})
                if group:
                    mean = mean_of(Weighted(trained[client], weights[client]) for client in group)
                    models[child] = joined(mean, model)
        return {"models": models, "clusters": clusters, **past}

    def groups(
        self, members: Sequence[int], changes: Sequence[Tree], weights: Sequence[float], past: Tree
    ) -> list[list[int]]:
        """The positions of a cluster's members, in one group or split in two.

        Args:
            members: the clients.
            changes: of their parameters.
            weights: of the members in the mean.
            past: what :meth:`remembered` returned.
        """
        everybody = list(range(len(members)))
        if len(members) <= max(self.min_size, 1):
            return [everybody]
        products = gram(changes)
        shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        mean = math.sqrt(max(float(shares @ products @ shares), 0.0))
        if mean >= self.mean_norm or float(products.diagonal().max()) <= self.max_norm**2:
            return [everybody]
        found = self.bipartition(members, cosines(products), past)
        return [everybody] if found is None else list(found)

    @abstractmethod
    def bipartition(self, members: Sequence[int], similarities: Tensor, past: Tree) -> Split | None:
        """The two groups of a cluster that may be split; None: it stays one.

        Args:
            members: the clients, at least two.
            similarities: cosines between their changes, float64 of shape (m, m).
            past: what :meth:`remembered` returned.
        """

    def remembered(self, server: Tree, sent: Mapping[int, Tree], trained: Mapping[int, Tree]) -> Tree:
        """What the server keeps beside models and clusters after a round, by names of its own.

        Args:
            server: before the round.
            sent: to each client, its ``model``.
            trained: of those that answered, their ``parameters``.
        """
        return {}

    def forgotten(self, past: Tree, members: Sequence[int]) -> Tree:
        """The same when these clients' cluster has been split."""
        return past

    async def local_update(self, client: Client, model: Tree) -> Tree:
        """The trained model, its parameters apart from its buffers."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return separated(trained, client.task.network)

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """Each client's cluster's model; to newcomers all of them."""
        models = server["models"]
        own = {int(client): {"model": models[str(number)]} for client, number in server["clusters"].items()}
        return {}, own | {client: {"models": models} for client in context.newcomers}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        if "models" in server:
            server = {"model": await fitting_model(client, server["models"])}
        return {"personalized": Predictor.of(server["model"])}
