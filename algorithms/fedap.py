"""FedAP: every client has the mixture of all models in which those count most whose batch normalizations read alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.on_demand import OnDemand
from algorithms.parts.phases import second_phase
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes, weighted_sums
from rayfl.tasks.base import Predictor, Task


class FedAP(Averaging):
    """FedAP (adaptive batch normalization): mixtures of models by the similarity of what normalization layers read.

    In the first floor(rho T) rounds it is FedBN: clients keep their normalization layers, and the model w without them
    is averaged. Then every client runs w with its own layers, in evaluation mode, over all its training samples. It
    sends the mean m and the standard deviation s, by channel, of what each batch normalization l reads. With them

        d_ij = sum_l ( ||m_il - m_jl||^2 + ||s_il - s_jl||^2 )^(1/2)
        W_ii = lambda,    W_ij = (1 - lambda) (1 / d_ij) / sum_{h != i} (1 / d_ih)

    are the weights of all later rounds. A term of the sum over l is the Wasserstein distance of two Gaussians without
    covariances. From then on client i of the cohort trains the mixture

        u_i = sum_j W_ij w_j

    over the latest models w_j of all clients; that of a client not sampled in the second phase is w. Normalization
    layers are never sent: it sets ``train.private_norm=all``. The model must have batch normalization.

    Server: w, d_ij, and the models w_j trained in the second phase. Client: its normalization layers. Down: w, in the
    second phase u_i. Up: w_i (and n_i in the first phase); once, of all clients, m and s. Evaluated: w, in the second
    phase u_i, with the client's own layers (``personalized``). There is no global model.

    ``aggregation`` is that of the first phase. With rho = 1 it is FedBN.

    References:
        Lu, Wang, Chen, Qin, Xu, Dimitriadis, Qin: Personalized Federated Learning with Adaptive Batchnorm for
        Healthcare, IEEE Transactions on Big Data 2022.
    """

    name: Literal["fedap"] = "fedap"
    personalized: ClassVar[str] = "personalized"
    no_privacy: ClassVar[str] = "its clients send models one by one, and the server mixes them for each client"
    citation: ClassVar[str] = "Lu et al., IEEE Trans. Big Data 2022"
    client_keeps: ClassVar[str] = "norm_k"
    server_keeps: ClassVar[str] = "w, d_ij, w_1..w_K without norm"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = "w after a local update: it has no place in W"
    no_private_norm: ClassVar[Mapping[str, str]] = {"statistics": "scales and shifts stay with its clients too"}
    train_settings: ClassVar[Mapping[str, Any]] = {"private_norm": "all"}

    warmup: float = setting(0.5, "rho", "fraction of the rounds that are FedBN; 0: a pretrained model", ge=0, le=1)
    own_share: float = setting(
        0.5, "lambda", "share of a client's own model in its mixture", ge=0, le=1, unless={"warmup": (1,)}
    )

    def personalizes(self, round: int, rounds: int) -> bool:
        """Returns whether round t (0-indexed) belongs to the second phase, t >= floor(rho T)."""
        return second_phase(round, rounds, self.warmup)

    def course(self, round: int, rounds: int) -> Any:
        """Returns whether the second phase has begun."""
        return self.personalizes(round, rounds)

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.personalizes(context.rounds - 1, context.rounds):
            return ()
        return (
            f"it is FedBN: algorithm.warmup is {self.warmup}, so that the second phase would begin after the last of "
            f"the run's {context.rounds} rounds",
        )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if not task.network.batch_statistics:
            raise ConfigError(
                "FedAP compares clients by what layers of batch normalization read, of which this model has none: set "
                "model.norm=batch where the model has that option, or choose another model or method"
            )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        if not self.personalizes(clients.context.round, clients.context.rounds):
            # in a fork with more rounds the first phase may come back, and what came after it begins again
            begun: Tree = {"distances": {}, "own": {}} if self.compares(server) else {}
            return {**super().round(server, cohort, clients), **begun}
        distances = server.get("distances")
        if not self.compares(server):
            distances = self.compared(server["model"], clients)
        mixed = self.mixed({**server, "distances": distances}, cohort)
        trained = clients.map(self.personal_update, cohort, broadcast={}, payloads=mixed)
        own = {**server.get("own", {}), **{str(client): reply["model"] for client, reply in trained.items()}}
        return {"distances": distances, "own": own}

    def compares(self, server: Tree) -> bool:
        """Returns whether the server has d_ij."""
        return isinstance(server.get("distances"), Tensor)

    def compared(self, model: Tree, clients: Clients) -> Tensor:
        """d_ij, float64 of shape (K, K); asks every client, sampled or not."""
        everyone = range(clients.context.num_clients)
        replies = clients.map(self.moments, everyone, broadcast={"model": model}, required=True)
        return wasserstein_distances(list(replies.values()))

    async def moments(self, client: Client, model: Tree) -> Tree:
        """``mean`` and ``deviation`` of what each batch normalization reads, by the number of its call: float64."""
        widths: list[int] = []

        def means(x: Tensor, task: Task) -> Tensor:
            read = [one.double()[..., None].flatten(2) for _, one in task.network.batch_norm_inputs(model, x)]
            widths[:] = [one.shape[1] for one in read]
            return torch.cat([*(one.mean(2) for one in read), *(one.square().mean(2) for one in read)], 1)

        if not client.task.network.batch_statistics:
            return {}
        mean, square = (await client.outputs(means)).mean(0).chunk(2)
        deviation = (square - mean.square()).clamp(min=0).sqrt()
        parts = {"mean": torch.split(mean, widths), "deviation": torch.split(deviation, widths)}
        return {key: {str(place): one for place, one in enumerate(found)} for key, found in parts.items()}

    def mixed(self, server: Tree, chosen: Sequence[int]) -> dict[int, Tree]:
        """u_i of the chosen clients, as ``model``."""
        weights, own = mixing_weights(server["distances"], self.own_share), server.get("own", {})
        models = [own.get(str(client), server["model"]) for client in range(len(weights))]
        found = weighted_sums(models, weights[list(chosen)])
        return {client: {"model": model} for client, model in zip(chosen, found, strict=True)}

    async def personal_update(self, client: Client, model: Tree) -> Tree:
        """Trains the received mixture."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return {"model": trained}

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        model: Tree = server["model"]
        if not self.compares(server):
            return {"model": model}, {}
        everyone = range(context.num_clients)
        return {"model": model}, OnDemand(everyone, num_bytes(model), partial(self.mixed, server))

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains w, normalization layers included."""
        return {"model": await client.train(server["model"], self.objective, stream=".join")}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(server["model"])}


def wasserstein_distances(described: Sequence[Mapping[str, Any]]) -> Tensor:
    """d_ij of clients by what they sent, float64 of shape (K, K); 0 where nothing is compared."""
    found = torch.zeros(len(described), len(described), dtype=torch.float64)
    for layer in described[0].get("mean", {}):
        points = torch.stack([torch.cat([one["mean"][layer], one["deviation"][layer]]) for one in described])
        # not by a matrix product, in which the distances of near points cancel
        found += torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    return found


def mixing_weights(distances: Tensor, own_share: float) -> Tensor:
    """W, float64 of shape (K, K), with rows of sum 1; where others are at distance 0 they share 1 - lambda alone.

    Args:
        distances: d_ij, finite, shape (K, K).
        own_share: lambda.
    """
    if len(distances) == 1:
        return torch.ones_like(distances)
    far = distances.clone().fill_diagonal_(torch.inf)
    nearest = far.min(1, keepdim=True).values
    shares = torch.where(far == nearest, 1, nearest / far)
    return ((1 - own_share) * shares / shares.sum(1, keepdim=True)).fill_diagonal_(own_share)
