"""FedSoft: several centers, of which every client trains one model that is near to all, as its samples are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.likelihoods import losses_of_samples
from algorithms.parts.means import mean_of
from algorithms.parts.proximity import proximity
from algorithms.parts.requirements import check_initial_models
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.objectives import TRAINED, Sum, loss
from rayfl.params import Tree, copy, weighted_sum
from rayfl.tasks.base import Predictor, Task, Trait


class FedSoft(Algorithm):
    """FedSoft (soft clustered federated learning): a client's samples belong to several clusters, its model to all.

    There are q centers c_1..c_q. A sample of client k belongs to the center that gives its class the highest
    probability, of equal ones the first. u_ks is the share of its training samples that belong to c_s, but no less than
    sigma before all are divided by their sum. A client finds its u_k when it takes part, if it has none or they are tau
    rounds old or older. Then it trains one model, from the mixture of the centers, which goes down

        CE(w_k) + lambda/2 sum_s u_ks ||w_k - c_s||^2

    and the server takes for each center

        c_s <- sum_{k in S} n_k u_ks w_k / sum_{k in S} n_k u_ks

    So a client does one local update, however many centers it belongs to. The proximal terms together pull w_k to the
    mixture sum_s u_ks c_s. Buffers (running statistics) are mixed and averaged like parameters, and are no part of the
    norm. With q = 1 it is FedProx.

    Server: c_1..c_q, drawn independently: equal ones would never part. Client: w_k, u_k. Down: all centers. Up: w_k,
    u_k and n_k. Evaluated: w_k of the client's last round (``personalized``), before its first the mixture; and the
    mixture of today's centers (``mixture``). A newcomer finds its u_k and takes the mixture. There is no single global
    model.

    References:
        Ruan, Joe-Wong: FedSoft: Soft Clustered Federated Learning with Proximal Local Updating, AAAI 2022, Algorithm 1.
    """

    name: Literal["fedsoft"] = "fedsoft"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Ruan and Joe-Wong, AAAI 2022"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "a sample belongs to a center by the likelihood of its class"}
    no_privacy: ClassVar[str] = "each client says how many of its samples belong to each center"
    client_keeps: ClassVar[str] = "w_k, u_k"
    server_keeps: ClassVar[str] = "c_1..c_q"
    newcomer: ClassVar[str] = "the mixture of the centers, by its samples"

    clusters: int = setting(2, "q", "number of centers", ge=1)
    proximal_weight: float = setting(0.1, "lambda", "weight of the proximal terms", ge=0)
    estimate_every: int = setting(
        2, "tau", "rounds after which a client's shares are found again", ge=1, unless={"clusters": (1,)}
    )
    least_share: float = setting(
        1e-4, "sigma", "the least share, so that no center loses a client", ge=0, lt=1, unless={"clusters": (1,)}
    )
    start: Literal["mixture", "own"] = setting(
        "mixture", "", "where local training begins: at the mixture of the centers, or at w_k, once there is one"
    )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if self.clusters > 1:
            check_initial_models("fedsoft", task.network)

    def init(self, task: Task, context: RoundContext) -> Tree:
        """Center 0 is the initial model of federated averaging; the others are drawn from streams of their own."""
        streams = ["init.global", *(f"init.global.{s}" for s in range(1, self.clusters))]
        return {
            "centers": {str(s): task.network.initialize(context.streams.integer(of)) for s, of in enumerate(streams)}
        }

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        centers = dict(server["centers"])
        messages = clients.map(self.local_update, cohort, {"centers": centers})
        samples = dict(zip(cohort, clients.num_samples(cohort).tolist(), strict=True))
        for number in centers:
            among = [
                Weighted(message["model"], samples[client] * share)
                for client, message in messages.items()
                if (share := float(message["shares"][int(number)]))
            ]
            if among:
                centers[number] = mean_of(among)
        return {"centers": centers}

    async def local_update(self, client: Client, centers: Tree) -> Tree:
        """Finds its shares, if it is time, and trains one model near the mixture of the centers."""
        kept, now = client.state.get("shares"), client.context.round
        if kept is None or (self.clusters > 1 and now - kept["round"] >= self.estimate_every):
            kept = {"values": await self.estimate(client, centers), "round": now}
        mixture = mixed(centers, kept["values"])
        begun = client.state.get("model") if self.start == "own" else None
        trained = await client.train(begun or mixture, self.objective, frozen={"mixture": mixture})
        client.state["model"], client.state["shares"] = trained, kept
        client.publish(local=Predictor.of(trained))
        return copy({"model": trained, "shares": kept["values"]})

    @property
    def objective(self) -> Sum:
        """CE + lambda/2 ||w - sum_s u_s c_s||^2, which has the gradient of the terms of all centers: u sums to 1."""
        return loss() + self.proximal_weight * proximity("half_squared", TRAINED, "mixture")

    async def estimate(self, client: Client, centers: Tree) -> Tensor:
        """The shares of a client's training samples that belong to each center; equal ones without samples."""
        if self.clusters == 1 or not client.num_samples:
            return torch.full((self.clusters,), 1 / self.clusters, dtype=torch.float64)
        nearest = (await losses_of_samples(client, centers.values())).argmin(1)
        counts = (nearest[:, None] == torch.arange(self.clusters, device=nearest.device)).double().sum(0).cpu()
        shares = (counts / len(nearest)).clamp(min=self.least_share)
        return shares / shares.sum()

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        centers, kept = server["centers"], client.state.get("shares")
        shares = await self.estimate(client, centers) if kept is None else kept["values"]
        mixture = Predictor.of(mixed(centers, shares))
        own = client.state.get("model")
        return {"personalized": mixture if own is None else Predictor.of(own), "mixture": mixture}


def mixed(centers: Tree, shares: Tensor) -> Tree:
    """sum_s u_s c_s.

    Args:
        centers: by number.
        shares: u, shape (q,).
    """
    return weighted_sum(list(centers.values()), shares.tolist())
