"""FedFomo: every client moves towards the models of a few others, as far as these do better on its own samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.mixture import parameters
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree, copy, subtract, tensors, weighted_sum
from rayfl.tasks.base import Model, Predictor, Task

_WORST = 1e30
"""Stands for a loss that is not finite: such a model gets no weight, and sums of its merit stay finite."""


def merits(base_loss: float, losses: Sequence[float], distances: Sequence[float]) -> np.ndarray:
    """r_n = (L(b) - L(w_n)) / ||w_n - b||, 0 for a model that is b itself; float64 of shape (m,).

    Args:
        base_loss: L(b).
        losses: L(w_n).
        distances: ||w_n - b||.
    """
    before, *after = np.nan_to_num([base_loss, *losses], nan=_WORST, posinf=_WORST)
    gained, apart = before - np.array(after), np.asarray(distances, dtype=np.float64)
    found: np.ndarray = np.divide(gained, apart, out=np.zeros_like(gained), where=apart > 0)
    return found


def mixing_weights(merit: np.ndarray) -> np.ndarray:
    """c_n = max(r_n, 0) / sum_m max(r_m, 0); all zero if no r_n is positive."""
    positive = np.maximum(merit, 0.0)
    total = positive.sum()
    weights: np.ndarray = positive / total if total > 0 else positive
    return weights


def draw_peers(
    affinities: Sequence[float], available: Sequence[int], count: int, explore: float, generator: np.random.Generator
) -> list[int]:
    """Returns whose models a client is sent, ascending.

    For each of ``count`` places, with the probability ``explore`` any client that has none yet, or else the one of them
    with the highest affinity; of several the generator takes one.

    Args:
        affinities: P_ij of the client i to every client j.
        available: the clients to choose from.
        count: M.
        explore: epsilon.
        generator: of the client and round.
    """
    left = [int(j) for j in generator.permutation(available)]
    chosen: list[int] = []
    while left and len(chosen) < count:
        best = max(range(len(left)), key=lambda place: affinities[left[place]])
        place = int(generator.integers(len(left))) if generator.random() < explore else best
        chosen.append(left.pop(place))
    return sorted(chosen)


class FedFomo(Algorithm):
    """FedFomo: clients keep models of their own, and move them towards the models of others that suit their samples.

    In its first round a client trains the initial model. In later ones the server sends client i the models w_n of up
    to M other clients. With its own model w_i, as last trained, among them, the client moves from b_i, where that
    training began, to

        b_i + sum_n c_n (w_n - b_i),    c_n = max(r_n, 0) / sum_m max(r_m, 0),
        r_n = (L_i(b_i) - L_i(w_n)) / ||w_n - b_i||

    with L_i the loss on its validation samples, and trains from there; where no r_n is positive it goes on from w_i.
    The server adds r_n to the affinity P_in. For each of the M places it chooses, with probability epsilon_t, a client
    at random, or else the one with the highest affinity. Norms are over all parameters; buffers (running statistics)
    are mixed with the same weights.

    Server: w_i of all clients that have trained, P. Client: w_i, b_i. Down: at most M models. Up: w_i, and r_n of each
    model it was sent. Evaluated: w_i (``personalized``), after training also where it began (``start``); with
    ``evaluate`` ``federated`` the model that a client would move to now (``personalized``), and w_i (``local``). A
    client never sampled has the initial model. There is no global model.

    References:
        Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with First Order Model Optimization,
        ICLR 2021, eqs. 2-4 and Algorithm 1.
    """

    name: Literal["fedfomo"] = "fedfomo"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Zhang et al., ICLR 2021"
    client_keeps: ClassVar[str] = "w_k, b_k"
    server_keeps: ClassVar[str] = "w_1..w_K, P"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = (
        "a model that it trains alone, moved towards random clients' by their merit, and trained again"
    )

    peers: int = setting(5, "M", "models of others that a client is sent at most", ge=0)
    explore: float = setting(
        0.3,
        "epsilon_0",
        "probability of a client chosen at random, in the first round",
        ge=0,
        le=1,
        unless={"peers": (0,)},
    )
    explore_decay: float = setting(
        0.05, "", "how much this falls in a round, to 0 at last", ge=0, unless={"peers": (0,), "explore": (0,)}
    )
    norm: Literal["l2", "l1"] = setting("l2", "", "norm of w_n - b_i")
    base: Literal["before", "trained"] = setting(
        "before", "b_i", "what others are compared with: w_i before its last training (paper), or w_i", kept=True
    )
    fallback: Literal["own", "base"] = setting(
        "own", "", "where a client goes on if nothing has merit: w_i or b_i", unless={"base": ("trained",)}
    )
    select_on: Literal["validation", "train"] = setting(
        "validation", "", "samples of the losses L_i (training samples where a client has none for validation)"
    )
    evaluate: Literal["stored", "federated"] = setting(
        "stored", "", "personalized model: w_i, or what it would be mixed to with the newest models of the best M"
    )

    def check_data(self, task: Task, sizes: np.ndarray, public: int) -> None:
        super().check_data(task, sizes, public)
        if self.select_on == "validation" and not sizes[:, 1].any():
            raise ConfigError(
                "holdout.validation leaves no client validation samples, on which fedfomo compares models: raise it, "
                "or set algorithm.select_on=train"
            )

    def explore_in(self, round: int) -> float:
        """epsilon_t of round t (0-indexed)."""
        return max(self.explore - self.explore_decay * round, 0.0)

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {"affinities": torch.zeros(context.num_clients, context.num_clients, dtype=torch.float64)}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        own, affinities = server.get("own", {}), server["affinities"].clone()
        context = clients.context
        asked = {i: self.chosen(i, server, context, self.explore_in(context.round)) for i in cohort}
        payloads = {i: {"peers": {str(j): own[str(j)] for j in chosen}} for i, chosen in asked.items()}
        replies = clients.map(self.local_update, cohort, {}, payloads)
        for i, reply in replies.items():
            affinities[i, asked[i]] += reply["merits"]
        return {"own": {**own, **{str(i): reply["model"] for i, reply in replies.items()}}, "affinities": affinities}

    def chosen(self, client: int, server: Tree, context: RoundContext, explore: float) -> list[int]:
        """Returns whose models a client is sent, ascending; nobody's before it has trained."""
        own = server.get("own", {})
        if str(client) not in own:
            return []
        available = sorted(int(j) for j in own if j != str(client))
        generator = context.streams.generator("peers", context.round, client)
        return draw_peers(server["affinities"][client].tolist(), available, self.peers, explore, generator)

    async def local_update(self, client: Client, peers: Tree) -> Tree:
        """Moves towards what has merit, and trains; returns the model, and the merits of the peers' models."""
        start, found = await self.moved(client, peers)
        trained = await client.train(start, self.objective)
        client.state["personal"] = copy(trained)  # what is sent is the server's
        if self.base == "before":
            client.state["base"] = start
        client.publish(personalized=Predictor.of(trained), start=Predictor.of(start))
        return {"model": trained, "merits": found}

    async def moved(self, client: Client, peers: Tree) -> tuple[Tree, Tensor]:
        """Returns where the client goes from its own model, and r_n of the peers, float64 of shape (m,)."""
        nothing = torch.zeros(len(peers), dtype=torch.float64)
        if "personal" not in client.state:  # it was sent peers' models only if its state was lost
            return client.initial_model(), nothing
        own: Tree = client.state["personal"]
        if not peers and self.fallback == "own":
            return own, nothing  # whatever the own model's merit is
        base: Tree = client.state["base"] if self.base == "before" else own
        models = [*peers.values(), own]
        split = self.select_on if len(client.examples(self.select_on)) else "train"
        before, *losses = [(await client.score(Predictor.of(model), split)).loss for model in (base, *models)]
        merit = merits(before, losses, [self.distance(model, base, client.task) for model in models])
        weights = mixing_weights(merit).tolist()
        known = torch.from_numpy(merit[: len(peers)])
        if not any(weights):
            return (own if self.fallback == "own" else base), known
        return weighted_sum(models, weights), known

    def distance(self, model: Model, base: Model, task: Task) -> float:
        """||w - b|| over all parameters."""
        order = 1 if self.norm == "l1" else 2
        apart = tensors(subtract(parameters(model, task), parameters(base, task)))
        lengths = torch.stack([torch.linalg.vector_norm(leaf.double(), order) for leaf in apart])
        return float(torch.linalg.vector_norm(lengths, order))

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        """The models of each client's best peers, if it is evaluated with them; to newcomers those of random peers."""
        own = server.get("own", {})
        asked = {client: self._random_peers(client, own, context) for client in context.newcomers}
        if self.evaluate != "stored":
            asked |= {int(i): self.chosen(int(i), server, context, explore=0.0) for i in own}
        return {}, {i: {"peers": {str(j): own[str(j)] for j in chosen}} for i, chosen in asked.items()}

    def _random_peers(self, client: int, own: Tree, context: RoundContext) -> list[int]:
        """Returns whose models a newcomer is sent, ascending."""
        generator = context.streams.generator("peers", context.round, client)
        nothing = [0.0] * context.num_clients
        return draw_peers(nothing, sorted(map(int, own)), self.peers, 1.0, generator)

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains from the initial model, then does what a client of a cohort does with the models of random peers."""
        await self.local_update(client, {})
        await self.local_update(client, server.get("peers", {}))
        return {}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        own = client.state["personal"] if "personal" in client.state else client.initial_model()
        if self.evaluate == "stored":
            return {"personalized": Predictor.of(own)}
        mixed, _ = await self.moved(client, server.get("peers", {}))
        return {"personalized": Predictor.of(mixed), "local": Predictor.of(own)}
