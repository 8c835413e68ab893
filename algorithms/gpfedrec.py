"""GPFedRec: the server joins users whose item vectors are alike in a graph, and mixes the vectors along its edges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.means import mean_over_cohort
from algorithms.parts.partial import PartialModel, part, shared_part
from algorithms.parts.split_clusters import cosines, gram
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.models.base import Network
from rayfl.objectives import TRAINED, Sum, frozen, loss, squared_distance
from rayfl.params import Tree, copy, weighted_sums
from rayfl.tasks.base import Predictor, Task


def adjacency(similarities: Tensor, size: int | None, threshold: float) -> Tensor:
    """A, whose row i is uniform over the neighbours of i and i itself; float64 of shape (m, m).

    Args:
        similarities: s, shape (m, m). The diagonal counts in the mean alone: everyone is a neighbour of itself.
        size: neighbours of each other than itself, the most similar ones; all that there are, if these are fewer. None:
            those whose similarity is above ``threshold`` times the mean of s.
        threshold: that factor.
    """
    themselves = torch.eye(len(similarities), dtype=torch.bool)
    if size is None:
        near = themselves | (similarities > threshold * similarities.mean())
    else:
        first = similarities.masked_fill(themselves, torch.inf).topk(min(size + 1, len(similarities))).indices
        near = torch.zeros_like(themselves).scatter(1, first, True)
    return near.double() / near.sum(1, keepdim=True)


class GPFedRec(PartialModel):
    """GPFedRec (graph-guided personalization): each user is drawn to a mixture of users who are like it.

    In a model that recommends (one client is one user) the body q holds the vectors of items, and the head P_i is the
    user's own. A client trains both from the received mean q and its latest P_i,

        CE(q_i, P_i) + lambda mean (q_i - r_i)^2

    keeps them, and sends q_i. The server compares the q_i of the cohort by their cosines s_ij. The neighbours of i are
    i itself and either the ``neighbours`` most similar clients, or all j with s_ij > gamma mean s. With A uniform over
    the neighbours in each row, what the graph convolutions (without weights) make of the q_i is

        r_i = sum_j (A^L)_ij q_j,    q <- sum_i r_i / |S|

    A client that has not yet taken part is drawn to the q that it receives. r_i stays until client i takes part
    again. Buffers (running statistics) of the body are averaged over the cohort.

    Nothing of this needs items: with another model the body is whatever ``head_group`` leaves.

    Server: q, and r_i of all clients that ever took part. Client: P_i, never sent, and q_i. Down: q and r_i. Up: q_i
    and n_i. Evaluated: q_i with P_i as last trained (``personalized``), and r_i with P_i (``mixture``); a client never
    sampled has q and the initial head. There is no global model.

    References:
        Zhang, Long, Zhou, Zhang, Yan, Yang: GPFedRec: Graph-guided Personalization for Federated Recommendation, KDD
        2024 (arXiv 2305.07866).
    """

    name: Literal["gpfedrec"] = "gpfedrec"
    no_privacy: ClassVar[str] = "its clients send models one by one, and the server compares them"
    citation: ClassVar[str] = "Zhang et al., KDD 2024"
    client_keeps: ClassVar[str] = "P_k, q_k"
    server_keeps: ClassVar[str] = "q, r_k"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = "q, and a P_k that it fits to it"

    aggregation: Literal["samples", "uniform", "population"] = setting(
        "uniform",
        "",
        "weights of the mean q: uniform 1/|S|; samples n_k / sum over the cohort; population n_k / sum over all "
        "clients, the rest staying on the old q",
    )
    proximal_weight: float = setting(1.0, "lambda", "weight of the mean squared distance to the mixture", ge=0)
    neighbours: int | None = setting(
        None,
        "",
        "neighbours of a client, the most similar ones; null: all that are more similar than gamma says",
        ge=0,
    )
    threshold: float = setting(
        1.0,
        "gamma",
        "neighbours are more similar than this times the mean similarity of the cohort",
        ge=0,
        only={"neighbours": (None,)},
    )
    hops: int = setting(1, "L", "convolutions; each reaches one edge farther", ge=1, unless={"neighbours": (0,)})

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.head_group == "all":
            raise ConfigError(
                "algorithm.head_group=all leaves nothing that clients share, of which the server could make a graph: "
                "set head_group=last_layer, or algorithm=local"
            )

    def mixed(self, network: Network) -> tuple[str, ...]:
        """Names of the parameters of the body."""
        body = set(self.body(network))
        return tuple(name for name in network.parameter_names if name in body)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        shared, own = shared_part(server), server.get("own", {})
        payloads = {client: {"mixture": own[str(client)]} for client in cohort if str(client) in own}
        sent = clients.map(self.drawn_update, cohort, broadcast={"shared": shared}, payloads=payloads)
        if not sent:
            return {}
        trained = [one["parameters"] for one in sent.values()]
        weights = torch.linalg.matrix_power(self.graph(trained), self.hops)
        mixtures = dict(zip(sent, weighted_sums(trained, weights), strict=True))
        averaged = {client: {**sent[client], "parameters": mixture} for client, mixture in mixtures.items()}
        mean = mean_over_cohort(self, averaged, self._parts(shared, clients.task.network), clients)
        return {
            "shared": part({**mean["parameters"], **mean.get("buffers", {})}, shared),
            "own": {**own, **{str(client): mixture for client, mixture in mixtures.items()}},
        }

    def graph(self, trained: Sequence[Tree]) -> Tensor:
        """A of the cohort's bodies, float64 of shape (m, m)."""
        return adjacency(cosines(gram(trained)), self.neighbours, self.threshold)

    async def drawn_update(self, client: Client, shared: Tree, mixture: Tree | None = None) -> Tree:
        """Trains body and head near the client's mixture; returns the body's ``parameters`` and any ``buffers``."""
        network = client.task.network
        anchor = part(shared if mixture is None else mixture, self.mixed(network))
        reads = {"mixture": anchor, "pull": self.proximal_weight / sum(leaf.numel() for leaf in anchor.values())}
        trained = await client.train(self.assembled(client, shared), self.objective, frozen=reads)
        if head := self.head(network):
            client.state["personal"] = part(trained, head)
        client.state["body"] = copy(part(trained, self.body(network)))  # what is sent is the server's
        client.publish(personalized=Predictor.of(trained))
        return self._parts(trained, network)

    @property
    def objective(self) -> Sum:
        """CE(q_i, P_i) + lambda mean (q_i - r_i)^2."""
        if not self.proximal_weight:
            return loss()
        return loss() + frozen("pull") * squared_distance("mixture", TRAINED)

    def _parts(self, model: Tree, network: Network) -> Tree:
        """The body's ``parameters`` and, if there are any, ``buffers``."""
        names = self.mixed(network)
        buffers = part(model, (name for name in self.body(network) if name not in names))
        return {"parameters": part(model, names), **({"buffers": buffers} if buffers else {})}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        own = server.get("own", {})
        return {"shared": server["shared"]}, {int(client): {"own": mixture} for client, mixture in own.items()}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        shared, own = server["shared"], client.state.get("body", {})
        bodies: dict[str, Any] = {"personalized": own, "mixture": server.get("own", {})}
        return {row: Predictor.of(self.assembled(client, {**shared, **body})) for row, body in bodies.items()}
