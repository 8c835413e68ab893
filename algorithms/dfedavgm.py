"""DFedAvgM: federated averaging without a server, in which clients mix their models with their neighbours'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from algorithms.base import Clients, setting
from algorithms.parts.partial import part
from algorithms.parts.peers import Peers
from algorithms.parts.topology import both_ways, metropolis
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.models.private_norm import private_names
from rayfl.params import Tree, add_scaled, copy, num_bytes, weighted_sum
from rayfl.tasks.base import Predictor


class DFedAvgM(Peers):
    """DFedAvgM (decentralized federated averaging with momentum): neighbours mix the models that they have trained.

    Client i has a model x_i of its own, at first the common initial model. In a round every client of the cohort S
    trains it to z_i by local steps with momentum, and gets the z_j of its neighbours:

        x_i <- sum_{j in S} W_ij z_j,    W_ij = 1 / (1 + max(d_i, d_j)) of neighbours,  W_ii = 1 - sum_{j != i} W_ij

    d_i is the number of i's neighbours in S. These Metropolis-Hastings weights are symmetric and doubly stochastic for
    every graph, so that mixing keeps the mean of all models, also where few take part. Clients that do not take part
    keep their x_i. The momentum theta is ``train.momentum``, from zero in each round; without it this is DFedAvg.

    With ``mixes=started`` neighbours exchange the models that they started from, and a client adds its own change:

        x_i <- sum_{j in S} W_ij x_j + (z_i - x_i)

    which is D-PSGD for one local step (``train.max_local_steps=1``) without momentum.

    In a complete graph with all clients it is federated averaging with uniform weights; a client without neighbours
    trains alone. Buffers (running statistics) are mixed like parameters.

    Server: nothing; the driver keeps the mean of all x_i for evaluations. Client: x_i. Down: z_j of its neighbours. Up:
    z_i, once for each neighbour. Evaluated: x_i (``personalized``) and the mean of the x_i of all clients (``global``);
    after training also z_i (``local``).

    References:
        Sun, Li, Wang: Decentralized Federated Averaging, TPAMI 2022, Algorithm 1.
        Lian, Zhang, Zhang, Hsieh, Zhang, Liu: Can Decentralized Algorithms Outperform Centralized Algorithms?,
        NeurIPS 2017 (D-PSGD).
    """

    name: Literal["dfedavgm"] = "dfedavgm"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Sun et al., TPAMI 2022"
    client_keeps: ClassVar[str] = "x_k"
    server_keeps: ClassVar[str] = "- (the driver: mean of x_1..x_K)"
    newcomer: ClassVar[str] = "the mean of all clients' models"

    mixes: Literal["trained", "started"] = setting(
        "trained", "", "what neighbours exchange: z_j (paper), or x_j, to which a client adds its own change (D-PSGD)"
    )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        weights = metropolis(both_ways(self.graph.of_round(clients.context, cohort)))
        rows = {
            i: {str(j): float(weight) for j, weight in zip(cohort, row, strict=True) if weight}
            for i, row in zip(cohort, weights, strict=True)
        }
        known = {i: {"weights": row} for i, row in rows.items()}
        sent = clients.map(self.local_update, cohort, {}, known, counted=False)
        given = {i: {"neighbours": {j: sent[int(j)] for j in row if int(j) != i}} for i, row in rows.items()}
        change = clients.mean(self.mix, cohort, {}, given)
        return {"model": add_scaled(server["model"], change, len(cohort) / clients.context.num_clients)}

    async def local_update(self, client: Client, weights: Tree) -> Tree:
        """Trains x_i; returns what its neighbours will get, which is counted when they do.

        Args:
            client: i.
            weights: W_ij of i and its neighbours.
        """
        own = self._own(client)
        trained = await client.train(own, self.objective)
        client.publish(local=Predictor.of(trained))
        client.state["model"] = trained
        client.state["exchange"] = {"started": own, "weights": weights}  # until it mixes
        return {"model": copy(self._sent(client, trained, own))}

    async def mix(self, client: Client, neighbours: Tree) -> Weighted:
        """Mixes what neighbours exchange; returns how x_i has changed, with the size of what the client has sent.

        Args:
            client: i.
            neighbours: the neighbours' models.
        """
        exchange = client.state.pop("exchange")
        trained, started, weights = client.state["model"], exchange["started"], exchange["weights"]
        sent = self._sent(client, trained, started)
        models = {str(client.id): sent, **{j: message["model"] for j, message in neighbours.items()}}
        mixed = weighted_sum([models[j] for j in weights], list(weights.values()))
        if self.mixes == "started":
            mixed = {name: leaf + (trained[name] - started[name]) for name, leaf in mixed.items()}
        client.state["model"] = {**trained, **mixed}
        client.publish(personalized=Predictor.of(client.state["model"]))
        # private tensors are no part of the mean: here they are what the client has of the global model
        change = {
            name: mixed[name] - started[name] if name in mixed else leaf.clone() for name, leaf in trained.items()
        }
        return Weighted(change, size=len(neighbours) * num_bytes(sent))

    def _sent(self, client: Client, trained: Tree, started: Tree) -> Tree:
        """The part of a model that neighbours get."""
        private = private_names(client.task.network, client.context.train.private_norm)
        model = trained if self.mixes == "trained" else started
        return part(model, [name for name in model if name not in private])

    def _own(self, client: Client) -> Tree:
        """x_i; the initial model until the client has taken part."""
        found: Tree = client.state["model"] if "model" in client.state else client.initial_model()
        return found

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        new = client.id >= client.context.num_clients
        own = server["model"] if new else self._own(client)
        return {"global": Predictor.of(server["model"]), "personalized": Predictor.of(own)}
