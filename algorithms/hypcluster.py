"""HypCluster: several models, of which every client takes the one that fits it best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from algorithms.base import Clients, setting
from algorithms.parts.clusters import ClusterModels
from algorithms.parts.requirements import check_initial_models
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class HypCluster(ClusterModels):
    """HypCluster (also IFCA): q models, each the federated average of the clients that it fits best.

    Client k takes c_k, the j with the least loss of w^j over all its training samples in evaluation mode (of equal
    ones the first), and makes the update of federated averaging from w^{c_k}. The server takes for every w^j the mean
    of the models of the cohort's clients with c_k = j, weighted by samples; a model that nobody takes stays.

    Server: models w^1..w^q, drawn independently: equal ones would never part. Client: nothing. Down: all q models.
    Up: c_k, w_k and n_k. Evaluated: w^{c_k} (``personalized``), c_k chosen again; with ``finetune_epochs`` also this
    model after fine-tuning (``finetuned``). There is no single global model.

    References:
        Mansour, Mohri, Ro, Suresh: Three Approaches for Personalization with Applications to Federated Learning,
        arXiv 2020, Algorithm HypCluster; Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered
        Federated Learning, NeurIPS 2020, Algorithm 1 (IFCA with model averaging).
    """

    name: Literal["hypcluster"] = "hypcluster"
    no_privacy: ClassVar[str] = "each client says which model fits its samples best"
    citation: ClassVar[str] = "Mansour et al., arXiv 2020"
    server_keeps: ClassVar[str] = "w^1..w^q"
    newcomer: ClassVar[str] = "the model of the cluster that fits it best"

    clusters: int = setting(2, "q", "number of models", ge=1)
    choice: Literal["loss", "accuracy"] = setting(
        "loss",
        "",
        "a client takes the model with the least loss on its training samples, or with the highest accuracy on its "
        "validation samples (training samples where it has none)",
        unless={"clusters": (1,)},
    )
    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of a cluster's mean: samples n_k / sum over its clients in the cohort, or uniform"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.clusters > 1:
            check_initial_models("hypcluster", task.network)

    def init(self, task: Task, context: RoundContext) -> Tree:
        """Model 0 is the initial model of federated averaging; the others are drawn from streams of their own."""
        streams = ["init.global", *(f"init.global.{j}" for j in range(1, self.clusters))]
        return {"models": {str(j): task.network.initialize(context.streams.integer(s)) for j, s in enumerate(streams)}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        models = server["models"]
        return {"models": {**models, **clients.means(self.local_update, cohort, broadcast={"models": models})}}

    async def local_update(self, client: Client, models: Tree) -> Weighted:
        """Trains the model that fits best."""
        chosen = await self.choose(client, models)
        trained = await client.train(models[chosen], self.objective)
        client.publish(local=Predictor.of(trained))
        return Weighted(trained, 1 if self.aggregation == "uniform" else client.num_samples, group=chosen)

    async def choose(self, client: Client, models: Tree) -> str:
        """c_k, as a key of ``models``."""
        held = self.choice == "accuracy" and len(client.examples("validation")) > 0
        split = "validation" if held else "train"
        found = {j: await client.score(Predictor.of(model), split) for j, model in models.items()}
        cost = {j: s.loss if self.choice == "loss" else -s.merit for j, s in found.items()}
        return min(cost, key=lambda j: (cost[j], int(j)))

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        models = server["models"]
        return await self.rows(client, models[await self.choose(client, models)])
