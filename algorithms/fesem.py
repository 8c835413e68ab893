"""FeSEM: several centers, of which every client belongs to the one that its trained model is nearest to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal

import torch

from algorithms.base import Clients, setting
from algorithms.parts.clusters import ClusterModels, hierarchical_clusters
from algorithms.parts.means import mean_of
from algorithms.parts.simplex import Array
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.models.base import Network
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


def distances(models: Sequence[Tree], centers: Sequence[Tree], network: Network) -> Array:
    """Returns ||W_i - C_k|| over all parameters, float64 of shape (len(models), len(centers))."""
    squares = torch.zeros(len(models), len(centers), dtype=torch.float64)
    for name in network.parameter_names:
        own, others = (torch.stack([one[name].flatten() for one in group]).double() for group in (models, centers))
        # by products of matrices small distances would be lost in rounding
        squares += torch.cdist(own, others, compute_mode="donot_use_mm_for_euclid_dist").square()
    found: Array = squares.sqrt().numpy()
    return found


class FeSEM(ClusterModels):
    """FeSEM (multi-center federated learning): clients are clustered by the distances of their models to K centers.

    A client of the cohort trains W_i from its center, as in federated averaging. Then the server takes, of the centers
    as they were sent,

        r_i = argmin_k ||W_i - C_k||,    C_k <- mean of W_i over i in S with r_i = k,

    of equal distances the first. A center without a client stays. A client that has no center yet trains from the mean
    of the centers, each weighted by the clients that belong to it. In the first round all centers are w_0, at no
    different distance: the cohort's trained models are merged, by complete linkage, until there are at most K clusters,
    whose means are the centers. Of fewer clusters the centers that are left over stay w_0. Distances are over all
    parameters; buffers (running statistics) are averaged.

    Server: C_1..C_K, r_i. Client: nothing. Down: one model. Up: W_i. Evaluated: C_{r_i} (``personalized``), of a client
    never sampled the mean of the centers; with ``finetune_epochs`` also this model after fine-tuning (``finetuned``).
    There is no global model. A newcomer trains once from the mean of the centers, and takes the one that is nearest to
    what it has trained.

    References:
        Long, Xie, Shen, Zhou, Wang, Jiang: Multi-Center Federated Learning: Clients Clustering for Better
        Personalization, World Wide Web 2023, Algorithm 1.
    """

    name: Literal["fesem"] = "fesem"
    no_privacy: ClassVar[str] = "the server compares the models of single clients"
    citation: ClassVar[str] = "Long et al., WWW Journal 2023"
    server_keeps: ClassVar[str] = "C_1..C_K, r_i"
    newcomer: ClassVar[str] = "the center that is nearest to a model that it trains once"

    centers: int = setting(2, "K", "number of centers", ge=1, kept=True)
    aggregation: Literal["uniform", "samples"] = setting(
        "uniform", "q_i", "weights of a center's mean: uniform (paper), or samples n_i"
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        return {"models": {str(k): model for k in range(self.centers)}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        models, known = server["models"], server.get("clusters", {})
        trained = clients.map(self.local_update, cohort, {}, self.models_of(cohort, server))
        numbers = self.nearest(list(trained.values()), models, clients.task.network, first=not known)
        assigned = dict(zip(trained, numbers, strict=True))
        samples = dict(zip(trained, clients.num_samples(list(trained)).tolist(), strict=True))
        weights = {k: 1 if self.aggregation == "uniform" else n for k, n in samples.items()}
        means = {
            str(number): mean_of(Weighted(trained[k], weights[k]) for k in trained if assigned[k] == number)
            for number in sorted(set(numbers))
        }
        return {
            "models": {**models, **means},
            "clusters": {**known, **{str(k): number for k, number in assigned.items()}},
        }

    def nearest(self, trained: Sequence[Tree], models: Tree, network: Network, first: bool = False) -> list[int]:
        """Returns r_i of some trained models.

        Args:
            trained: W_i.
            models: the centers.
            network: names the parameters.
            first: whether there are no centers yet, and clusters are found among the models themselves.
        """
        if not trained:  # nobody of the cohort has come to the end of a round
            return []
        if first:
            found = dict.fromkeys(range(len(trained)), 0)
            groups = hierarchical_clusters(distances(trained, trained, network), "complete", 0.0, self.centers)
            found |= {place: number for number, members in enumerate(groups) for place in members}
            return list(found.values())
        return [int(k) for k in distances(trained, list(models.values()), network).argmin(1)]

    def models_of(self, who: Iterable[int], server: Tree) -> dict[int, Tree]:
        """Returns by client, as ``model``, its center, or the mean of the centers where it has none yet."""
        known, shared = server.get("clusters", {}), self.shared_model(server)
        own = {client: known.get(str(client)) for client in who}
        return {k: {"model": shared if number is None else server["models"][str(number)]} for k, number in own.items()}

    def shared_model(self, server: Tree) -> Tree:
        """Returns the mean of the centers, weighted by the clients that belong to them; w_0 before the first round."""
        counts = Counter(server.get("clusters", {}).values()) or {0: 1}
        return mean_of(Weighted(server["models"][str(number)], count) for number, count in sorted(counts.items()))

    async def local_update(self, client: Client, model: Tree) -> Tree:
        """Trains the received model."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return trained

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """Each client's center, or the mean of all; to newcomers all of them."""
        own = self.models_of(range(context.num_clients), server)
        late = {"model": self.shared_model(server), "models": server["models"]}
        return {}, own | dict.fromkeys(context.newcomers, late)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains from the mean of the centers, and takes the nearest center."""
        trained = await self.local_update(client, server["model"])
        (number,) = self.nearest([trained], server["models"], client.task.network)
        return {"model": server["models"][str(number)]}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return await self.rows(client, server["model"])
