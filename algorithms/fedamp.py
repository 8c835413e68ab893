"""FedAMP: every client is pulled towards a mixture of all clients' models in which similar ones weigh more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Algorithm, Clients, setting
from algorithms.parts.partial import joined, separated
from algorithms.parts.proximity import proximity
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.objectives import TRAINED, frozen, loss
from rayfl.params import Tree, copy, tensors, weighted_sums
from rayfl.tasks.base import Predictor, Task

_NO_PULL = {"heuristic and proximal_weight": ((True, 0),)}
"""Beside these, nothing reads alpha."""


def attraction(distances: Tensor, own: Sequence[int], sigma: float, alpha: float, clip: bool = True) -> Tensor:
    """xi_ij = alpha A'(||w_i - w_j||^2) with A'(x) = exp(-x / sigma) / sigma, and xi_ii = 1 - sum of the others.

    Args:
        distances: squared distances of some clients to all, shape (c, m).
        own: each row's client among the m.
        sigma: sigma.
        alpha: alpha_t.
        clip: scale the others of a row to sum 1 where they exceed it, so that xi_ii is never negative.
    """
    place = torch.arange(len(own)), torch.as_tensor(own)
    weights = alpha / sigma * torch.exp(-distances / sigma)
    weights[place] = 0
    if clip:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
    left = 1 - weights.sum(1)
    weights[place] = left.clamp(min=0) if clip else left
    return weights


def heuristic_attraction(cosines: Tensor, own: Sequence[int], sigma: float, self_weight: float) -> Tensor:
    """xi_ij = (1 - xi_ii) exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h)); alone, xi_ii = 1.

    Args:
        cosines: of some clients to all, shape (c, m).
        own: each row's client among the m.
        sigma: sigma.
        self_weight: xi_ii.
    """
    if cosines.shape[1] == 1:
        return torch.ones_like(cosines)
    place = torch.arange(len(own)), torch.as_tensor(own)
    exponents = sigma * cosines
    exponents[place] = -torch.inf
    weights = (1 - self_weight) * exponents.softmax(1)
    weights[place] = self_weight
    return weights


class FedAMP(Algorithm):
    """FedAMP (federated attentive message passing): personal models pulled towards mixtures of similar ones.

    The server sends client i of the cohort its cloud model, a mixture of the personal models as last trained,

        u_i = sum_j xi_ij w_j,    sum_j xi_ij = 1

    and the client trains w_i, from where it was, on

        CE(w_i) + lambda / (2 alpha_t) ||w_i - u_i||^2,    alpha_t = max(alpha decay^floor(t / every), alpha_min)

    A client that trains for the first time has no cloud model yet, and is not pulled.
    With ``heuristic`` (HeurFedAMP) xi_ii is ``self_weight``, and the others share the rest in proportion to
    exp(sigma cos(w_i, w_j)). Without it xi_ij = alpha_t A'(||w_i - w_j||^2) with A'(x) = exp(-x / sigma) / sigma, and
    xi_ii is what is left. Cosines and distances are over all parameters; buffers (running statistics) are mixed with
    the same weights.

    Server: w_i of all clients that have trained. Client: w_i, if training starts there. Down: u_i, the initial model
    for a client that has not trained yet. Up: w_i. Evaluated: w_i (``personalized``), after training also u_i
    (``cloud``); a client never sampled has the initial model. There is no global model.

    References:
        Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021,
        Algorithm 1 (FedAMP) and its heuristic variant HeurFedAMP.
    """

    name: Literal["fedamp"] = "fedamp"
    personalized: ClassVar[str] = "personalized"
    citation: ClassVar[str] = "Huang et al., AAAI 2021"
    client_keeps: ClassVar[str] = "w_k"
    server_keeps: ClassVar[str] = "w_1..w_K"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = "a model that it trains alone: no other is near it yet"

    heuristic: bool = setting(True, "", "weights from cosines (HeurFedAMP); false: from distances (FedAMP)")
    proximal_weight: float = setting(1.0, "lambda", "weight of the pull, which alpha_t divides; 0: local only", ge=0)
    proximal_form: Literal["half_squared", "norm_per_layer"] = setting(
        "half_squared",
        "",
        "1/2 ||.||^2 (paper), or sum of unsquared norms per weight tensor",
        unless={"proximal_weight": (0,)},
    )
    alpha: float = setting(1e4, "alpha_0", "step of the mixtures, and divisor of the pull", gt=0, unless=_NO_PULL)
    alpha_decay: float = setting(0.1, "", "factor on alpha every alpha_every rounds", gt=0, le=1, unless=_NO_PULL)
    alpha_every: int = setting(
        30, "", "rounds between two such factors", ge=1, unless={"alpha_decay": (1,), **_NO_PULL}
    )
    alpha_min: float = setting(
        1.0, "", "alpha stays at this from where it would fall below it", gt=0, unless={"alpha_decay": (1,), **_NO_PULL}
    )
    sigma: float = setting(
        25.0,
        "sigma",
        "sharpness of the weights (heuristic), or scale of distances",
        ge=0,
        unless={"heuristic and self_weight": ((True, 1),)},
    )
    self_weight: float | None = setting(
        None,
        "xi_ii",
        "heuristic: weight of a client's own model; null: 1 / number of models",
        ge=0,
        le=1,
        only={"heuristic": (True,)},
    )
    clip_self: bool = setting(
        True,
        "",
        "without heuristic: scale weights of others that exceed 1 in all, so that xi_ii is not negative",
        only={"heuristic": (False,)},
    )
    start: Literal["own", "cloud"] = setting("own", "", "where local training starts: w_i or u_i", kept=True)

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        if not self.heuristic and self.sigma == 0:
            raise ConfigError("algorithm.sigma divides distances if algorithm.heuristic is false: set it above 0")
        if self.proximal_form != "half_squared" or context.train.optimizer != "sgd":
            return
        for t in range(context.rounds):
            if (moved := context.train.lr_in(t) * self.pull_in(t)) >= 1:
                raise ConfigError(
                    f"from round {t} on, a step's pull would overshoot the cloud model: the learning rate times "
                    f"algorithm.proximal_weight over alpha is {moved:.3g}, not below 1; raise algorithm.alpha_min or "
                    "algorithm.alpha_decay, or lower algorithm.proximal_weight or train.lr"
                )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        if self.alpha_decay < 1 and self.alpha <= self.alpha_min:
            return (
                f"alpha stays at {self.alpha:g}, since algorithm.alpha_min is not below it: lower that for "
                "algorithm.alpha_decay to have an effect, or set algorithm.alpha_decay=1",
            )
        return ()

    def alpha_in(self, round: int) -> float:
        """alpha_t of round t (0-indexed)."""
        return max(self.alpha * self.alpha_decay ** (round // self.alpha_every), min(self.alpha_min, self.alpha))

    def pull_in(self, round: int) -> float:
        """lambda / alpha_t."""
        return self.proximal_weight / self.alpha_in(round)

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        own = server.get("own", {})
        payloads = {client: {"initial": server["model"]} for client in cohort}
        known = [client for client in cohort if str(client) in own]
        if known:
            mixed = weighted_sums(list(own.values()), self.weights(known, own, clients.context.round))
            payloads |= {k: {"cloud": joined(one, server["model"])} for k, one in zip(known, mixed, strict=True)}
        trained = clients.map(self.local_update, cohort, broadcast={}, payloads=payloads)
        return {"own": {**own, **{str(client): parts for client, parts in trained.items()}}}

    def weights(self, clients: Sequence[int], own: Tree, round: int) -> Tensor:
        """xi of some clients over all that have trained, float64 of shape (c, m)."""
        places = [list(own).index(str(client)) for client in clients]
        if not places:
            return torch.zeros(0, len(own), dtype=torch.float64)
        vectors = torch.stack([torch.cat([leaf.flatten() for leaf in tensors(w["parameters"])]) for w in own.values()])
        vectors = vectors.double()
        if self.heuristic:
            unit = F.normalize(vectors, dim=1)
            own_weight = 1 / len(own) if self.self_weight is None else self.self_weight
            return heuristic_attraction(unit[places] @ unit.T, places, self.sigma, own_weight)
        distances = torch.stack([(vectors - vectors[place]).square().sum(1) for place in places])
        return attraction(distances, places, self.sigma, self.alpha_in(round), self.clip_self)

    async def local_update(self, client: Client, cloud: Tree | None = None, initial: Tree | None = None) -> Tree:
        """Trains the personal model near the cloud model; returns its ``parameters`` and, if any, ``buffers``.

        A client without a cloud model is given the initial one, and trains alone.
        """
        received: Any = initial if cloud is None else cloud
        start = received
        if self.start == "own":
            start = client.state["personal"] if "personal" in client.state else client.initial_model()
        if self.proximal_weight and cloud is not None:
            reads = {"cloud": cloud, "pull": self.pull_in(client.round)}
            trained = await client.train(start, self.objective, frozen=reads)
        else:
            trained = await client.train(start, loss())
        if self.start == "own":
            client.state["personal"] = copy(trained)  # what is sent is the server's
        client.publish(personalized=Predictor.of(trained), cloud=Predictor.of(received))
        return separated(trained, client.task.network)

    @property
    def objective(self) -> Any:
        """CE + lambda / (2 alpha_t) ||w - u||^2."""
        return loss() + proximity(self.proximal_form, TRAINED, "cloud") * frozen("pull")

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        return {}

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        own, initial = server.get("own", {}), server["model"]
        return {"model": initial}, {int(client): {"own": joined(w, initial)} for client, w in own.items()}

    async def join(self, client: Client, server: Tree) -> Tree:
        """Trains from the initial model, as every client does at first."""
        return {"own": joined(await self.local_update(client, initial=server["model"]), server["model"])}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"personalized": Predictor.of(server.get("own") or server["model"])}
