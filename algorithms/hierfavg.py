"""HierFAVG: edges average the models of their clients, and a cloud averages the edges' models now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from algorithms.base import Clients, setting
from algorithms.parts.clusters import ClusterModels, fitting_model
from algorithms.parts.means import mean_of
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task


class HierFAVG(ClusterModels):
    """HierFAVG (hierarchical federated averaging): clients, edges and a cloud, each a mean of what is below it.

    Each client belongs to one of E edges. A client i of the cohort S trains the model of its edge, as in federated
    averaging; the local epochs are kappa_1. In every round an edge takes the mean of its clients C_e, and in every
    kappa_2-th round the cloud takes the mean of all edges, which is then the model of each edge:

        w_e <- sum_{i in S, C_e} n_i w_i / sum_{i in S, C_e} n_i

        w <- sum_e N_e w_e / sum_e N_e,    w_e <- w

    N_e is the number of samples of all clients of the edge. An edge without a client in S keeps its model. Buffers
    (running statistics) are averaged with the same weights.

    Server: w_1..w_E, and w, that of the last mean of the cloud, w_0 before the first. Client: nothing. Down: w_e of its
    edge. Up: w_i and n_i. Evaluated: w_e of the client's edge (``personalized``) and w (``global``); with
    ``finetune_epochs`` also w_e after fine-tuning (``finetuned``).

    With one edge w_e is that of federated averaging, and with ``cloud_every=1`` it is so if all clients take part, or
    with ``cloud_weights=cohort``. If the cloud never takes a mean, each edge is a federated averaging of its own.

    References:
        Liu, Zhang, Song, Letaief: Client-Edge-Cloud Hierarchical Federated Learning, ICC 2020, Algorithm 1.
    """

    name: Literal["hierfavg"] = "hierfavg"
    no_privacy: ClassVar[str] = "each edge takes a mean of its own clients, and noise is for one mean over the cohort"
    citation: ClassVar[str] = "Liu et al., ICC 2020"
    server_keeps: ClassVar[str] = "w_1..w_E, w"
    newcomer: ClassVar[str] = "the model of the edge that fits it best"

    edges: int = setting(2, "E", "number of edges; not more than clients", ge=1, kept=True)
    cloud_every: int = setting(
        2, "kappa_2", "rounds from one mean of the cloud to the next; more than train.rounds: never", ge=1
    )
    assignment: Literal["blocks", "in_turn", "random"] = setting(
        "blocks",
        "",
        "which clients belong to an edge: as many consecutive ones each (so are groups and domains numbered), every "
        "E-th one, or drawn at random by the seed, as many each",
        unless={"edges": (1,)},
    )
    cloud_weights: Literal["all", "cohort"] = setting(
        "all",
        "N_e",
        "clients whose samples count for an edge in the mean of the cloud: all of the edge (paper), or those that took "
        "part since the last mean of the cloud, each as often as it did",
        unless={"edges": (1,)},
        kept=True,
    )
    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_i", "what clients count in both means: their samples n_i, or 1 each"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.edges > context.num_clients:
            raise ConfigError(
                f"algorithm.edges is {self.edges}, but only {context.num_clients} clients take part in training, so "
                "that edges would be left without one: lower it"
            )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.edges == 1:
            return ()
        if self.cloud_every > context.rounds:
            return (
                f"the cloud never takes a mean, and edges stay apart: algorithm.cloud_every is {self.cloud_every}, but "
                f"the run has {context.rounds} rounds",
            )
        if over := context.rounds % self.cloud_every:
            return (
                f"the last {over} of {context.rounds} rounds follow the last mean of the cloud, and are not in the "
                f"global model: algorithm.cloud_every is {self.cloud_every}",
            )
        return ()

    def edges_of(self, context: RoundContext) -> list[str]:
        """Returns the edge of each client, as a key of the server's ``edges``."""
        numbers = np.arange(context.num_clients)
        found = numbers % self.edges if self.assignment == "in_turn" else numbers * self.edges // len(numbers)
        if self.assignment == "random":
            found = context.streams.generator("edges").permutation(found)
        return [str(edge) for edge in found.tolist()]

    def init(self, task: Task, context: RoundContext) -> Tree:
        model = super().init(task, context)["model"]
        return {"model": model, "edges": {str(edge): model for edge in range(self.edges)}}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        edge_of, context = self.edges_of(clients.context), clients.context
        payloads = {client: {"model": server["edges"][edge_of[client]]} for client in cohort}
        models = {**server["edges"], **clients.means(self.local_update, cohort, broadcast={}, payloads=payloads)}
        counted = self.cloud_weights == "cohort" and self.edges > 1  # with one edge there is nothing to weigh
        counting = cohort if counted else range(context.num_clients)
        weights = {**dict.fromkeys(models, 0), **server.get("weights", {})}
        for client, samples in zip(counting, clients.num_samples(counting).tolist(), strict=True):
            weights[edge_of[client]] += 1 if self.aggregation == "uniform" else samples
        done: Tree = {"edges": models}
        if (context.round + 1) % self.cloud_every == 0:
            parts = [Weighted(models[edge], weight) for edge, weight in weights.items() if weight]
            mean = mean_of(parts) if parts else server["model"]
            done = {"model": mean, "edges": dict.fromkeys(models, mean)}
            weights = dict.fromkeys(models, 0)
        return {**done, "weights": weights} if counted else done

    def sent(self, server: Tree) -> Tree:
        return {"model": server["model"]}  # an edge's is as long

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        """Trains the model of the client's edge."""
        edge = self.edges_of(client.context)[client.id]
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return Weighted(trained, 1 if self.aggregation == "uniform" else client.num_samples, group=edge)

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """The cloud's model, and to each client that of its edge; to newcomers those of all edges."""
        own = {client: {"edge": server["edges"][edge]} for client, edge in enumerate(self.edges_of(context))}
        return {"model": server["model"]}, own | {k: {"edges": server["edges"]} for k in context.newcomers}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        edge = await fitting_model(client, server["edges"]) if "edges" in server else server["edge"]
        return {**self.global_predictors(server, client.task), **await self.rows(client, edge)}
