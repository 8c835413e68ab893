"""FedDrift: clients whom no model fits any more begin models of their own, which are merged where they agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch

from algorithms.base import Clients, setting
from algorithms.parts.clusters import ClusterModels, fitting_model, hierarchical_clusters
from algorithms.parts.kept_models import largest_model
from algorithms.parts.means import mean_of
from algorithms.parts.simplex import Array
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree
from rayfl.tasks.base import Predictor, Task

SHARED, UNTRAINED, TRAINED = range(3)
"""Whether a client has a model that others may take, or one of its own that it has not trained yet, or has."""

_ONE = {"most_models": (1,)}


def cluster_distances(losses: Array, clusters: Sequence[int], samples: Array) -> Array:
    """Returns D_ij = max(L_ij - L_ii, L_ji - L_jj, 0) of clusters that all have a client, float64 of shape (M, M).

    L_ij is the mean loss of model i over the samples of the clients of cluster j.

    Args:
        losses: l_ki of client k and model i, shape (K, M).
        clusters: c_k, from 0 to M - 1, shape (K,).
        samples: n_k, shape (K,).
    """
    shares = samples[:, None] * (np.asarray(clusters)[:, None] == np.arange(losses.shape[1]))
    means = losses.T @ (shares / shares.sum(0))
    worse = means - means.diagonal()[:, None]
    found: Array = np.maximum(np.maximum(worse, worse.T), 0)
    return found


class FedDrift(ClusterModels):
    """FedDrift: several models, new ones where clients drift, and fewer where models do as well for each other.

    Each client trains the model of its cluster c_k, at first all of them one model, and the server takes the mean of
    each cluster, as in federated averaging. Rounds are divided into time steps of R rounds, and a stage of the data
    (section ``stages``) begins one, too. At the beginning of a step every client that has training samples, sampled or
    not, says the mean loss l_kj over them, in evaluation mode, of each model w_j that others may take. It has drifted
    if even the best one is worse than the best one was a step ago:

        min_j l_kj > l_k + delta,    l_k <- min_j l_kj

    Then it begins a cluster with a copy of the best model, which it alone trains until the next step, and as long as it
    has not been sampled. All others take the best model, of equal ones the first. Of these clusters those are merged,
    by complete linkage, that are at most delta_m apart,

        D_ij = max(L_ij - L_ii, L_ji - L_jj, 0),    L_ij = sum_{k in C_j} n_k l_ki / sum_{k in C_j} n_k

    into the mean of their models, weighted by their clients' samples. A model without a client stays, and may be taken
    later. FedDrift-Eager (``variant: eager``) merges nothing: all clients that drift in a step begin one cluster
    together, with the best model of the first of them, which others may take from the next step on.

    The first step finds nothing out. As long as nobody drifts it is federated averaging.

    Server: w_1..w_M, c_k, l_k. Client: nothing. Down: the model of its cluster, and c_k; at the beginning of a step all
    models that others may take. Up: w_k and n_k; l_kj. Evaluated: the model of the client's cluster as that is
    (``personalized``), also for clients never sampled; with ``finetune_epochs`` also this model after fine-tuning
    (``finetuned``). There is no global model. A newcomer takes the model with the least loss.

    References:
        Jothimurugesan, Hsieh, Wang, Joshi, Gibbons: Federated Learning under Distributed Concept Drift, AISTATS 2023.
    """

    name: Literal["feddrift"] = "feddrift"
    no_privacy: ClassVar[str] = "each client says the losses of all models on its samples"
    citation: ClassVar[str] = "Jothimurugesan et al., AISTATS 2023"
    server_keeps: ClassVar[str] = "w_1..w_M, c_k, l_k"
    newcomer: ClassVar[str] = "the model that fits it best"
    kept_on_server: ClassVar[str] = "a model of each cluster, of which each client may begin one"

    variant: Literal["full", "eager"] = setting(
        "full",
        "",
        "full: each client that drifts begins a cluster, and clusters are merged; eager: all that drift in a step "
        "begin one cluster together",
        unless=_ONE,
    )
    threshold: float = setting(
        0.5,
        "delta",
        "a client has drifted if the loss of the best model has risen by more than this since the last time step",
        ge=0,
        unless=_ONE,
    )
    merge_threshold: float | None = setting(
        None,
        "delta_m",
        "clusters at most this far apart are merged; null: delta",
        ge=0,
        only={"variant": ("full",)},
        unless=_ONE,
    )
    step_rounds: int = setting(2, "R", "rounds of a time step; a stage of the data begins one in any case", ge=1)
    most_models: int | None = setting(
        None,
        "M",
        "how many models there are at most: the one that nobody has had for longest makes room for a new one, and "
        "where each has a client nobody begins a cluster; null: one more than there are clients",
        ge=1,
    )
    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "q_k", "weights of a cluster's mean: samples n_k / sum over its clients in the cohort, or uniform"
    )

    def kept_bytes(self, task: Task, context: RoundContext, samples: int) -> int:
        """See :class:`KeptModels`; numbers beside the models do not count."""
        return self.most(context) * largest_model(task)

    def most(self, context: RoundContext) -> int:
        """Returns M."""
        return context.num_clients + 1 if self.most_models is None else self.most_models

    def init(self, task: Task, context: RoundContext) -> Tree:
        nobody = torch.zeros(context.num_clients, dtype=torch.int64)
        # before its first step no loss of a client is too high
        never = torch.full((context.num_clients,), torch.finfo(torch.float64).max, dtype=torch.float64)
        model = super().init(task, context)["model"]
        return {
            "models": {"0": model},
            "used": {"0": 0},
            "clusters": nobody,
            "alone": nobody.clone(),
            "losses": never,
            "begun": 0,
        }

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        context = clients.context
        late = context.round - server["begun"] >= self.step_rounds
        now = {**server, **(self.begin_step(server, clients) if late or context.begins_stage else {})}
        models, numbers = now["models"], now["clusters"].tolist()
        payloads = {k: {"model": models[str(numbers[k])], "cluster": numbers[k]} for k in cohort}
        means = clients.means(self.local_update, cohort, broadcast={}, payloads=payloads)
        alone = now["alone"].clone()
        for client in cohort:
            if alone[client] == UNTRAINED and str(numbers[client]) in means:
                alone[client] = TRAINED
        return {**now, "models": {**models, **means}, "alone": alone}

    async def local_update(self, client: Client, model: Tree, cluster: int) -> Weighted:
        """Trains the model of the client's cluster."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        weight = 1 if self.aggregation == "uniform" else client.num_samples
        return Weighted(trained, weight, group=str(cluster))

    async def compare(self, client: Client, models: Tree) -> Tree:
        """Returns l_kj of all models, float64 in their order."""
        found = [(await client.score(Predictor.of(model), "train")).loss for model in models.values()]
        return {"losses": torch.tensor(found, dtype=torch.float64)}

    def begin_step(self, server: Tree, clients: Clients) -> Tree:
        """Begins a time step.

        Args:
            server: as it is.
            clients: who has training samples and is not alone with an untrained model says its losses.

        Returns:
            The entries of ``server`` that change: clusters, and models that are begun or merged.
        """
        numbers, alone, last = (server[key].clone() for key in ("clusters", "alone", "losses"))
        alone[alone == TRAINED] = SHARED
        closed, begun = numbers[alone == UNTRAINED].tolist(), clients.context.round
        models = {number: server["models"][number] for number in sorted(server["models"], key=int)}
        offered = {number: model for number, model in models.items() if int(number) not in closed}
        samples = clients.num_samples(range(len(numbers)))
        asked = [k for k in range(len(numbers)) if samples[k] and alone[k] == SHARED]
        replies = clients.map(self.compare, asked, {"models": offered}, required=True) if asked else {}
        if not replies:
            return {"alone": alone, "begun": begun}
        who, order = list(replies), list(map(int, offered))
        losses = torch.stack([reply["losses"] for reply in replies.values()])
        least = losses.min(1).values
        numbers[who] = torch.tensor(order)[losses.argmin(1)]
        drifted = [k for k, worse in zip(who, least > last[who] + self.threshold, strict=True) if worse]
        last[who] = least
        state = {"models": models, "used": dict(server["used"]), "clusters": numbers, "alone": alone}
        self.begin_clusters(drifted, state, self.most(clients.context))
        if self.variant == "full":
            self.merge_clusters(who, order, losses.numpy(), samples, state)
        state["used"] |= dict.fromkeys(map(str, numbers.tolist()), begun)
        return {**state, "losses": last, "begun": begun}

    def begin_clusters(self, drifted: Sequence[int], state: Tree, most: int) -> None:
        """Gives clients that have drifted a cluster each, or one together.

        Args:
            drifted: these clients, with the clusters of their best models.
            state: models, when these were last used, clusters and who is alone; changed.
            most: M.
        """
        numbers, together = state["clusters"], self.variant == "eager"
        for place, client in enumerate(drifted):
            if not (together and place):
                number, start = free_number(state, most), state["models"][str(int(numbers[client]))]
            if number is None:
                return
            state["models"][str(number)] = start
            numbers[client] = number
            if not together:
                state["alone"][client] = UNTRAINED

    def merge_clusters(
        self, who: Sequence[int], order: Sequence[int], losses: Array, samples: Array, state: Tree
    ) -> None:
        """Merges clusters that are near.

        Args:
            who: the clients that have said losses.
            order: the models of which they have.
            losses: l_kj, shape (len(who), len(order)).
            samples: n_k of all clients.
            state: models, clusters and who is alone; changed.
        """
        numbers = state["clusters"]
        rows = [row for row, k in enumerate(who) if state["alone"][k] == SHARED]
        members = {number: [who[row] for row in rows if numbers[who[row]] == number] for number in order}
        taken = [number for number in order if members[number]]
        columns = [order.index(number) for number in taken]
        of = [taken.index(int(numbers[who[row]])) for row in rows]
        distances = cluster_distances(losses[np.ix_(rows, columns)], of, samples[[who[row] for row in rows]])
        limit = self.threshold if self.merge_threshold is None else self.merge_threshold
        for group in hierarchical_clusters(distances, "complete", limit):
            first, *others = sorted(taken[place] for place in group)
            if not others:
                continue
            sizes = {number: int(samples[members[number]].sum()) for number in (first, *others)}
            state["models"][str(first)] = mean_of(Weighted(state["models"][str(n)], size) for n, size in sizes.items())
            for number in others:
                numbers[numbers == number] = first
                del state["models"][str(number)], state["used"][str(number)]

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """Each client's cluster's model; to newcomers all of them."""
        models, numbers = server["models"], server["clusters"].tolist()
        own = {k: {"model": models[str(number)]} for k, number in enumerate(numbers)}
        return {}, own | {k: {"models": models} for k in context.newcomers}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = server["model"] if "model" in server else await fitting_model(client, server["models"])
        return await self.rows(client, model)


def free_number(state: Tree, most: int) -> int | None:
    """Returns the number of a new model; None where there are too many that somebody has.

    Args:
        state: models, when these were last used, and clusters; of too many models one that nobody has is taken out.
        most: M.
    """
    models, used = state["models"], state["used"]
    if len(models) >= most:
        idle = [number for number in models if int(number) not in state["clusters"].tolist()]
        if not idle:
            return None
        oldest = min(idle, key=lambda number: (used[number], int(number)))
        del models[oldest], used[oldest]
    return next(number for number in range(len(models) + 1) if str(number) not in models)
