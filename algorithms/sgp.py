"""SGP: clients send shares of their models along directed links, and divide what they have by what it weighs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch

from algorithms.base import Clients, setting
from algorithms.parts.directed import DirectedGraph, DirectedKind, sent_shares
from algorithms.parts.partial import part
from algorithms.parts.peers import Decentralized
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.models.private_norm import private_names
from rayfl.objectives import loss
from rayfl.params import Tree, add_scaled, map_leaves, num_bytes, subtract, weighted_sum
from rayfl.tasks.base import Predictor, Task


class SGP(Decentralized):
    """SGP (stochastic gradient push): models go along directed links, and weights that go with them undo the bias.

    Client i has a sum x_i and its weight u_i, at first the common initial model and 1. Its model is z_i = x_i / u_i. In
    a round every client of the cohort S trains z_i to y_i by local steps, adds the change to its sum, and sends a
    share of sum and weight to each of those that it has a link to:

        x_i <- sum_{j in S} P_ij (x_j + y_j - z_j),    u_i <- sum_{j in S} P_ij u_j,    P_ij = 1 / (1 + d_j)

    d_j is the number of clients that j sends to in S; it keeps a share for itself. Each column of P sums to 1, so that
    all x_i together, and all u_i, keep their sums in whatever graph. Nobody needs to know who will be heard: unlike a
    mean over symmetric links (DFedAvgM), this takes no answer and no agreement. Where all u_i stay 1, as in graphs in
    which all send and get as much, x_i = z_i is mixed alone. Clients that do not take part keep x_i and u_i.

    Running statistics are weighed as models are (u_j times what j has after training), so that variances stay positive.

    Server: nothing; the driver keeps the mean of all x_i for evaluations. Client: x_i, u_i. Down: shares of those that
    send to it, each with its weight. Up: a share for each link. Evaluated: z_i (``personalized``) and the mean of the
    x_i of all clients (``global``); after training also y_i (``local``).

    References:
        Assran, Loizou, Ballas, Rabbat: Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, Algorithm 1.
        Nedic, Olshevsky: Stochastic Gradient-Push for Strongly Convex Functions on Time-Varying Directed Graphs, IEEE
        Transactions on Automatic Control 2016.
    """

    name: Literal["sgp"] = "sgp"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Assran et al., ICML 2019"
    client_keeps: ClassVar[str] = "x_k, u_k"
    server_keeps: ClassVar[str] = "- (the driver: mean of x_1..x_K)"
    newcomer: ClassVar[str] = "the mean of all clients' sums"

    links: DirectedKind = setting(
        "one_peer",
        "",
        "who sends to whom: one_peer (2^j places ahead among those that take part, another j in each round) or random, "
        "which are graphs of each round; or a fixed graph, of which a round has the links among those that take part: "
        "exponential (to 2^j clients ahead, for all j), ring (to the next)",
    )
    receivers: int = setting(
        1, "d", "to how many each client sends, all where fewer take part", only={"links": ("random",)}, ge=1
    )

    @property
    def graph(self) -> DirectedGraph:
        """Returns who sends to whom."""
        return DirectedGraph(self.links, self.receivers)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        self.graph.check(context.num_clients)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        clients = context.num_clients
        if self.links in ("one_peer", "random") or context.smallest_cohort == clients:
            return ()
        degree = 1 if self.links == "ring" else (clients - 1).bit_length()
        met = degree * (context.mean_cohort - 1) / (clients - 1)
        return (
            f"a client sends to {degree} others by algorithm.links={self.links}, of which {met:.2g} take part in a "
            f"round, as {context.mean_cohort:.3g} of {clients} clients do: set train.clients_per_round=all, or "
            "algorithm.links=one_peer",
        )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        shares = sent_shares(self.graph.of_round(clients.context, cohort))
        reached = (shares > 0).sum(0) - 1
        rows = {
            i: {str(j): float(share) for j, share in zip(cohort, shares[row], strict=True) if share}
            for row, i in enumerate(cohort)
        }
        known = {i: {"shares": rows[i], "receivers": int(each)} for i, each in zip(cohort, reached, strict=True)}
        sent = clients.map(self.local_update, cohort, {}, known, counted=False)
        given = {i: {"arrived": {j: sent[int(j)] for j in rows[i] if int(j) != i}} for i in cohort}
        change = clients.mean(self.add, cohort, {}, given)
        return {"model": add_scaled(server["model"], change, len(cohort) / clients.context.num_clients)}

    async def local_update(self, client: Client, shares: Tree, receivers: int) -> Tree:
        """Trains z_i; returns x_i + y_i - z_i and u_i, of which shares are counted when they arrive.

        Args:
            client: i.
            shares: P_ij of i and of those that send to it.
            receivers: how many it sends to.
        """
        total, weight = self._own(client)
        model = self._model(client, total, weight)
        trained = await client.train(model, loss())
        client.publish(local=Predictor.of(trained))
        moved = {name: leaf + (trained[name] - model[name]) for name, leaf in total.items()}
        moved |= {name: trained[name] * weight for name in client.task.network.buffer_names}
        moved |= part(trained, self._private(client))
        client.state["push"] = {"total": moved, "weight": weight}
        client.state["exchange"] = {"began": total, "shares": shares, "receivers": receivers}  # until others' arrive
        return {"total": self._sent(client, moved), "weight": weight}

    async def add(self, client: Client, arrived: Tree) -> Weighted:
        """Adds the shares that have arrived to its own; returns how x_i has changed, with the size of what it has sent.

        Args:
            client: i.
            arrived: of those that send to it, x_j + y_j - z_j and u_j.
        """
        exchange, own = client.state.pop("exchange"), client.state["push"]
        mine = {"total": self._sent(client, own["total"]), "weight": own["weight"]}
        messages = {str(client.id): mine, **arrived}
        shares = list(exchange["shares"].values())
        totals, weights = ([messages[j][key] for j in exchange["shares"]] for key in ("total", "weight"))
        mixed = weighted_sum(totals, shares)
        weight = sum(share * each for share, each in zip(shares, weights, strict=True))
        client.state["push"] = {"total": {**own["total"], **mixed}, "weight": weight}
        client.publish(personalized=Predictor.of(self._model(client, *self._own(client))))
        # private tensors are no part of the mean: here they are what the client has of the global model
        private = part(own["total"], self._private(client))
        change = {**subtract(mixed, part(exchange["began"], mixed)), **map_leaves(torch.clone, private)}
        return Weighted(change, size=exchange["receivers"] * (num_bytes(mine["total"]) + _WEIGHT_BYTES))

    def _private(self, client: Client) -> list[str]:
        """Names of tensors that are never sent."""
        return sorted(private_names(client.task.network, client.context.train.private_norm))

    def _sent(self, client: Client, total: Tree) -> Tree:
        private = self._private(client)
        return part(total, [name for name in total if name not in private])

    def _own(self, client: Client) -> tuple[Tree, float]:
        """x_i and u_i; the initial model and 1 until the client has taken part."""
        found = client.state.get("push")
        return (client.initial_model(), 1.0) if found is None else (found["total"], found["weight"])

    def _model(self, client: Client, total: Tree, weight: float) -> Tree:
        """z_i = x_i / u_i."""
        return {**map_leaves(lambda leaf: leaf / weight, total), **part(total, self._private(client))}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        new = client.id >= client.context.num_clients
        own = server["model"] if new else self._model(client, *self._own(client))
        return {"global": Predictor.of(server["model"]), "personalized": Predictor.of(own)}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return server, {}


_WEIGHT_BYTES = 8
"""Of u_j on its way."""
