"""pFedSim: after federated averaging, every client mixes the bodies of clients whose heads are similar to its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.base import Averaging, Clients, check_head, setting
from algorithms.parts.phases import second_phase
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree, weighted_sum
from rayfl.tasks.base import Predictor, Task

_LARGEST_SIMILARITY = 0.9999
"""Self-similarity, and the most that two clients count as: -ln(1 - s) stays finite."""


def mixing_weights(similarities: Tensor) -> Tensor:
    """u_j proportional to -ln(1 - s_j), with sum 1.

    Args:
        similarities: of one client to all, in [0, 1] and 1 to itself, shape (K,).
    """
    weights = -torch.log1p(-similarities.clamp(0, _LARGEST_SIMILARITY))
    return weights / weights.sum()


def head_similarity(weights: Tensor, by_class: bool) -> Tensor:
    """Similarities of classifiers: symmetric, in [0, 1], the diagonal 1; float64 of shape (m, m).

    Args:
        weights: weights of m heads, shape (m, C, f).
        by_class: the mean over classes of the cosines of their rows, or the cosine of the whole matrices.
    """
    rows = weights.double() if by_class else weights.double().flatten(1)[:, None]
    unit = F.normalize(rows, dim=-1)
    cosines = torch.einsum("icf,jcf->ij", unit, unit) / unit.shape[1]
    return ((cosines + cosines.T) / 2).clamp(0, 1).fill_diagonal_(1)


class PFedSim(Averaging):
    """pFedSim: similarity-aware aggregation of bodies, after a first phase of federated averaging.

    In the first floor(rho T) rounds it is federated averaging. Then the model w is every client's own, and stays the
    global one. From then on client i of the cohort receives its own head P_i and the body

        sum_j u_j G_j,    u_j proportional to -ln(1 - s_ij),    sum_j u_j = 1

    over the own models (G_j, P_j) of all clients, trains all of it as in federated averaging, and the result is its
    own model. After the round s_ij = max(0, mean over classes of the cosine of the heads' rows) for all pairs of
    the cohort; other pairs keep theirs, at first 0. A client is as similar to itself as 0.9999, and no two clients
    are more. The head is the last linear layer; its bias is no part of the similarity.

    Server: model w, own models of all clients trained in the second phase, similarities (K, K). Client: nothing.
    Down: w; in the second phase (sum_j u_j G_j, P_i). Up: w_k (and n_k in the first phase). Evaluated: w (``global``)
    and the own model as last trained (``personalized``), w if it was not trained in the second phase.

    ``aggregation`` is that of the first phase. The similarity follows the authors' code; with ``similarity``
    ``matrix`` it is the cosine of the whole weight matrices.

    References:
        Tan, Zhou, Liu, Wang: pFedSim: Similarity-Aware Model Aggregation Towards Personalized Federated Learning,
        arXiv 2305.15706, 2023, Algorithm 1.
    """

    name: Literal["pfedsim"] = "pfedsim"
    personalized: ClassVar[str] = "personalized"
    no_privacy: ClassVar[str] = "its clients send models one by one, and the server compares them"
    citation: ClassVar[str] = "Tan et al., arXiv 2023"
    server_keeps: ClassVar[str] = "w, (G_k, P_k), s_ij"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = "w, in the second phase after a local update"

    warmup: float = setting(0.5, "rho", "fraction of the rounds that are federated averaging", ge=0, le=1)
    similarity: Literal["rows", "matrix"] = setting(
        "rows", "s_ij", "mean over classes of the cosines of the heads' rows, or one cosine of the heads' weights"
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
            f"it is federated averaging: algorithm.warmup is {self.warmup}, so that the second phase would begin after "
            f"the last of the run's {context.rounds} rounds",
        )

    def check(self, task: Task, context: RoundContext) -> None:
        super().check(task, context)
        check_head("pFedSim", task.network)

    def init(self, task: Task, context: RoundContext) -> Tree:
        return {**super().init(task, context), **self._similar_to_nobody(context)}

    def _similar_to_nobody(self, context: RoundContext) -> Tree:
        return {"similarities": torch.eye(context.num_clients, dtype=torch.float64)}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        if not self.personalizes(clients.context.round, clients.context.rounds):
            # in a fork with more rounds the first phase may come back, and what came after it begins again
            begun = {**self._similar_to_nobody(clients.context), "own": {}} if "own" in server else {}
            return {**super().round(server, cohort, clients), **begun}
        payloads = {client: {"model": self.received_by(client, server)} for client in cohort}
        trained = clients.map(self.personal_update, cohort, broadcast={}, payloads=payloads)
        own = {**server.get("own", {}), **{str(client): model for client, model in trained.items()}}
        similarities = server["similarities"].clone()
        heads = torch.stack([_weight(trained[client]["head"]) for client in cohort])
        pairs = torch.as_tensor(cohort)
        similarities[pairs[:, None], pairs] = head_similarity(heads, by_class=self.similarity == "rows")
        return {"own": own, "similarities": similarities}

    def received_by(self, client: int, server: Tree) -> Tree:
        """The model sent to a client in the second phase: its own head, and the mixed body."""
        own = server.get("own", {})
        if str(client) not in own:
            # similar to nobody yet
            return dict(server["model"])
        weights = mixing_weights(server["similarities"][client]).tolist()
        similar = [j for j, weight in enumerate(weights) if weight > 0]
        body = weighted_sum([own[str(j)]["body"] for j in similar], [weights[j] for j in similar])
        return _whole({"body": body, "head": own[str(client)]["head"]}, server["model"])

    async def personal_update(self, client: Client, model: Tree) -> Tree:
        """Trains the received model; returns ``body`` and ``head``."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        head = client.task.network.head_names
        return {
            "body": {name: leaf for name, leaf in trained.items() if name not in head},
            "head": {name: trained[name] for name in head},
        }

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        model = server["model"]
        own = {int(client): {"own": _whole(parts, model)} for client, parts in server.get("own", {}).items()}
        return {"model": model}, own

    async def join(self, client: Client, server: Tree) -> Tree:
        """In the second phase trains from the model of the first, as every client does."""
        if not self.personalizes(client.round, client.context.rounds):
            return {}
        found = await self.personal_update(client, server["model"])
        return {"own": _whole(found, server["model"])}

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = server["model"]
        return {"global": Predictor.of(model), "personalized": Predictor.of(server.get("own") or model)}


def _whole(parts: Tree, like: Tree) -> Tree:
    """Body and head as one model, its tensors in the order of another's."""
    model = {**parts["body"], **parts["head"]}
    return {name: model[name] for name in like}


def _weight(head: Tree) -> Tensor:
    """The weight of a linear layer, which is its only matrix."""
    found: Tensor = next(leaf for leaf in head.values() if leaf.dim() == 2)
    return found
