"""CFL: clients are split into two groups whenever federated averaging has converged for their mean but not for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, check_everyone, setting
from algorithms.parts.clusters import fitting_model
from algorithms.parts.means import mean_of
from algorithms.parts.partial import joined, part, separated
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import TINY, Tree, subtract
from rayfl.tasks.base import Predictor, Task


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


def bipartition(similarities: Tensor, linkage: Literal["single", "complete"]) -> tuple[list[int], list[int]]:
    """Two groups of the rows, the first one with row 0; both ascending.

    Args:
        similarities: symmetric, shape (m, m), m >= 2.
        linkage: ``single`` minimises the largest similarity between the groups; ``complete`` merges the groups whose
            least similar members are most similar, as public codes do.
    """
    # takes a moment to import, and few runs need it
    from scipy.cluster.hierarchy import cut_tree
    from scipy.cluster.hierarchy import linkage as merged

    pairs = np.triu_indices(len(similarities), 1)
    distances = np.maximum(1 - similarities.numpy()[pairs], 0)
    label = cut_tree(merged(distances, method=linkage), n_clusters=2)[:, 0]
    members = range(len(similarities))
    return [i for i in members if label[i] == label[0]], [i for i in members if label[i] != label[0]]


class CFL(Algorithm):
    """CFL (clustered federated learning): federated averaging in clusters of clients, which split when they disagree.

    All clients make the update of federated averaging from their cluster's model w_c, Delta_k = x_k - w_c. A cluster
    whose mean change is small while some client's is not,

        ||mean_k Delta_k|| < eps_1    and    max_k ||Delta_k|| > eps_2,

    is split in two, so that the largest cosine between changes of the one and of the other group is as small as
    possible. Each of the two takes w_c and the mean of its own members' changes, in the same round. Norms and cosines
    are those of the parameters; buffers (running statistics) are averaged. A cluster is split once a round at most.

    Server: a model and the members of each cluster. Client: nothing. Down: w_c. Up: x_k. Evaluated: w_c
    (``personalized``). There is no global model.

    References:
        Sattler, Mueller, Samek: Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization under
        Privacy Constraints, IEEE TNNLS 2020, Algorithms 1-3.
    """

    name: Literal["cfl"] = "cfl"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Sattler et al., TNNLS 2020"
    server_keeps: ClassVar[str] = "w_c, clusters"
    newcomer: ClassVar[str] = "the model of the cluster that fits it best"

    mean_norm: float = setting(0.4, "eps_1", "a cluster may be split if its mean change is shorter; 0: never", ge=0)
    max_norm: float = setting(1.6, "eps_2", "and if a member's change is longer", ge=0, unless={"mean_norm": (0,)})
    split_from: int = setting(20, "", "rounds before the first split", ge=0, unless={"mean_norm": (0,)})
    min_size: int = setting(2, "", "clusters of this size or smaller are not split", ge=1, unless={"mean_norm": (0,)})
    linkage: Literal["single", "complete"] = setting(
        "single",
        "",
        "which bipartition: the one whose largest cosine between the groups is least (paper), or complete linkage "
        "(public codes)",
        unless={"mean_norm": (0,)},
    )
    gap: float | None = setting(
        None,
        "gamma_max",
        "split only if sqrt((1 - largest cosine between the groups) / 2) is larger (paper); null: always (public code)",
        ge=0,
        le=1,
        unless={"mean_norm": (0,)},
    )
    aggregation: Literal["uniform", "samples"] = setting(
        "uniform", "q_k", "weights of a cluster's mean: uniform (authors' code), or samples n_k (paper)"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_everyone("CFL compares the changes of all clients", context)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.split_from < context.rounds:
            return ()
        return (
            f"the clients stay one cluster: algorithm.split_from is {self.split_from}, but the run has "
            f"{context.rounds} rounds",
        )

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
                split = self.groups(changes, [weights[client] for client in members])
                groups = [[members[i] for i in group] for group in split]
            for group, child in zip(groups, (number, str(len(models))), strict=False):
                clusters.update({str(client): int(child) for client in group})
                if group:
                    mean = mean_of(Weighted(trained[client], weights[client]) for client in group)
                    models[child] = joined(mean, model)
        return {"models": models, "clusters": clusters}

    def groups(self, changes: Sequence[Tree], weights: Sequence[float]) -> list[list[int]]:
        """The positions of a cluster's members, in one group or split in two.

        Args:
            changes: of the members' parameters.
            weights: of the members in the mean.
        """
        members = list(range(len(changes)))
        if len(members) <= max(self.min_size, 1):
            return [members]
        products = gram(changes)
        shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
        mean = math.sqrt(max(float(shares @ products @ shares), 0.0))
        if mean >= self.mean_norm or float(products.diagonal().max()) <= self.max_norm**2:
            return [members]
        similarities = cosines(products)
        first, second = bipartition(similarities, self.linkage)
        largest = max(float(similarities[i, j]) for i, j in product(first, second))
        if self.gap is not None and math.sqrt(max(1 - largest, 0.0) / 2) <= self.gap:
            return [members]
        return [first, second]

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
