"""FedDWA: the server mixes, for each client, the models nearest to where its next local step would lead it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.neighbours import inverse_weights, mixtures, squared_distances
from algorithms.parts.partial import joined, part, separated
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.models.private_norm import private_names
from rayfl.params import Tree, tensors
from rayfl.tasks.base import Predictor, Task

STREAM = ".guidance"
"""Suffix of the streams of the steps that make the guidance model."""


class FedDWA(Algorithm):
    """FedDWA (dynamic weight adjustment): personal models are mixtures near the models that clients are heading for.

    Client i trains the mixture u_i that it is sent to w_i, and goes one local step further, to its guidance model g_i.
    It sends both. Of the cohort S the server gives client i the mixture that it starts from in its next round,

        u_i = sum_{j in S} p_ij w_j,    p_ij = ||g_i - w_j||^-2 / sum_{h in S} ||g_i - w_h||^-2

    after all p_ij of a row but the K largest, which may include p_ii, are set to 0 and the rest is divided by its sum.
    In its first round a client starts from the initial model. Distances are over all parameters; buffers (running
    statistics) are mixed with the same weights. A client that is not sampled keeps its mixture.

    Server: u_i of all clients that have trained. Client: nothing. Down: u_i. Up: w_i, and the parameters of g_i.
    Evaluated: u_i (``personalized``), after training w_i (``local``); a client never sampled has the initial model.
    There is no global model.

    With one client in S, or K = 1 and guidance models that are nearest to their own client's, it is local training.

    References:
        Liu, Wu, Chen, Hu, Zhou, Wu: FedDWA: Personalized Federated Learning with Dynamic Weight Adjustment, IJCAI 2023.
    """

    name: Literal["feddwa"] = "feddwa"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Liu et al., IJCAI 2023"
    server_keeps: ClassVar[str] = "u_1..u_K"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = "a model that it trains alone: no mixture is made for it"

    top_k: int | None = setting(
        5, "K", "models in a mixture, the nearest ones (its own counts as one); null: all of the cohort", ge=1
    )
    guidance_steps: int | None = setting(
        1, "", "mini-batches from w_i to the guidance model; null: train.local_epochs (authors' code)", ge=1
    )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        own, initial = server.get("own", {}), server["model"]
        payloads = {i: {"model": joined(own[str(i)], initial) if str(i) in own else initial} for i in cohort}
        replies = clients.map(self.local_update, cohort, broadcast={}, payloads=payloads)
        guidance = [reply["guidance"] for reply in replies.values()]
        models = [reply["model"] for reply in replies.values()]
        compared = [part(model["parameters"], one) for model, one in zip(models, guidance, strict=True)]
        distances = squared_distances([tensors(one) for one in guidance], [tensors(one) for one in compared])
        mixed = mixtures(models, *inverse_weights(distances, self.top_k or len(models)))
        return {"own": {**own, **{str(i): one for i, one in zip(replies, mixed, strict=True)}}}

    async def local_update(self, client: Client, model: Tree) -> Tree:
        """Trains the received mixture, and goes on from there; returns ``model``, and parameters of ``guidance``."""
        network, train = client.task.network, client.context.train
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        guidance = await client.train(
            trained, self.objective, steps=self.guidance_steps, stream=STREAM, keep_optimizer=False
        )
        private = private_names(network, train.private_norm)
        sent = [name for name in network.parameter_names if name not in private]
        return {"model": separated(trained, network), "guidance": part(guidance, sent)}

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        initial = server["model"]
        return {"model": initial}, {int(i): {"own": joined(u, initial)} for i, u in server.get("own", {}).items()}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains the initial model, as every client does at first."""
        trained = await client.train(server["model"], self.objective)
        return {"own": trained}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(server.get("own") or server["model"])}
