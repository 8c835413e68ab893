"""FedCAC: clients whose critical parameters are the same ones collaborate on these; the rest is everybody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Averaging, Clients, setting
from algorithms.on_demand import OnDemand
from algorithms.parts.masks import kept_count
from algorithms.parts.means import mean_over_cohort
from algorithms.parts.partial import joined, separated
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.params import Tree, map_leaves, num_bytes, tensors, weighted_sums
from rayfl.tasks.base import Predictor, Task

_LEAST_THRESHOLD = 1e-10
"""Where the last of the critical elements is not above it, all that are not zero are critical."""


def critical(trained: Tree, received: Tree, share: float) -> Tree:
    """Returns which elements of each tensor are critical, the largest |(w - w_received) w|; boolean.

    Args:
        trained: w, by name.
        received: what training started from.
        share: tau, the share of each tensor's elements; of equal ones at the border all are critical.
    """
    return map_leaves(lambda w, start: _largest(((w - start) * w).abs(), share), trained, received)


def _largest(scores: Tensor, share: float) -> Tensor:
    count = kept_count(share, scores.numel())
    if count in (0, scores.numel()):
        return torch.full_like(scores, bool(count), dtype=torch.bool)
    threshold = scores.flatten().sort(descending=True).values[count - 1]
    return scores > 0 if threshold <= _LEAST_THRESHOLD else scores >= threshold


def overlaps(masks: Sequence[Tree]) -> Tensor:
    """o_ij = 1 - |M_i - M_j|_1 / (2 |M_i|_1), in [0, 1], the diagonal 1; float64 of shape (m, m).

    Args:
        masks: boolean trees of one structure. Two empty ones overlap wholly.
    """
    rows = torch.stack([torch.cat([leaf.flatten() for leaf in mask.values()]) for mask in masks])
    differing = torch.stack([(rows ^ row).sum(1) for row in rows]).double()
    found = 1 - differing / (2 * rows.sum(1).clamp(min=1).double()[:, None])
    return found.clamp(0, 1)


def partners(overlap: Tensor, progress: float) -> Tensor:
    """For each client itself and those whose overlap reaches mean + progress (max - mean), over all pairs i != j.

    Args:
        overlap: shape (m, m).
        progress: (t + 1) / beta; above 1 nobody reaches it, unless all overlaps are equal.

    Returns:
        1 for each client's partners and 0 for the others, float64 of shape (m, m).
    """
    themselves = torch.eye(len(overlap), dtype=torch.bool)
    if len(overlap) == 1:
        return themselves.double()
    mean, most = overlap[~themselves].mean(), overlap[~themselves].max()
    if float(most) == float(overlap[~themselves].min()):
        return torch.ones_like(overlap)
    return (themselves | (overlap >= mean + progress * (most - mean))).double()


class FedCAC(Averaging):
    """FedCAC (critical parameter aware collaboration): critical parameters are averaged among similar clients alone.

    A client makes the update of federated averaging from its received model. Of every tensor the share tau of the
    elements with the largest |(w_i - w_received) w_i| are critical for client i, its mask M_i. With the overlaps
    o_ij = 1 - |M_i - M_j|_1 / (2 |M_i|_1) of the cohort, the clients j with

        o_ij >= mean o + (t + 1) / beta (max o - mean o)

    are partners of i. The client's next model is the uniform mean g_i of its own and its partners' models where M_i
    is set, and the latest mean of the cohort's models elsewhere. From round beta on nobody has partners, unless all
    overlaps are equal, as those of a cohort of two are, and critical elements are the client's own. Buffers (running
    statistics) are averaged over the cohort.

    Server: mean w; M_i and g_i of all clients that ever took part. Client: nothing. Down: M_i g_i + (1 - M_i) w. Up:
    w_i and n_i. Evaluated: w (``global``) and the client's next model (``personalized``); a client never sampled has
    w.

    References:
        Wu, Liu, Niu, Zhu, Tang: Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through
        Cautiously Aggressive Collaboration, ICCV 2023, eqs. 4-9 and Algorithm 1.
    """

    name: Literal["fedcac"] = "fedcac"
    personalized: ClassVar[str] = "personalized"
    no_privacy: ClassVar[str] = "its clients send models and masks one by one, and the server compares them"
    citation: ClassVar[str] = "Wu et al., ICCV 2023"
    server_keeps: ClassVar[str] = "w, M_k, g_k"
    keeps_models: ClassVar[bool] = True
    newcomer: ClassVar[str] = "w"

    aggregation: Literal["samples", "uniform", "population"] = setting(
        "samples",
        "q_k",
        "weights of the mean: samples n_k / sum over the cohort; uniform 1/|S|; population n_k / sum over all clients, "
        "the rest staying on the old server model",
    )
    critical_share: float = setting(0.5, "tau", "share of each tensor's elements that are critical", ge=0, le=1)
    collaboration_rounds: int = setting(
        100, "beta", "rounds after which clients have no partners any more", ge=1, unless={"critical_share": (0,)}
    )

    def kept_of_client(self, task: Task, clients: int) -> int:
        masks = sum(leaf.numel() for leaf in tensors(task.network.initialize(0)))
        return super().kept_of_client(task, clients) + masks

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        model = server["model"]
        received = {client: self.received_by(client, server) for client in cohort}
        payloads = {client: {"model": tree} for client, tree in received.items()}
        trained = clients.map(self.personal_update, cohort, broadcast={}, payloads=payloads)
        mean = mean_over_cohort(self, trained, separated(model, clients.task.network), clients)
        parts = [trained[client]["parameters"] for client in cohort]
        masks = [critical(w, received[client], self.critical_share) for client, w in zip(cohort, parts, strict=True)]
        progress = (clients.context.round + 1) / self.collaboration_rounds
        own = dict(server.get("own", {}))
        together = partners(overlaps(masks), progress)
        means = weighted_sums(parts, together / together.sum(1, keepdim=True))
        for client, mask, mean_of_partners in zip(cohort, masks, means, strict=True):
            own[str(client)] = {"mask": mask, "model": mean_of_partners}
        return {"model": joined(mean, model), "own": own}

    def received_by(self, client: int, server: Tree) -> Tree:
        """The client's next model."""
        model: Tree = server["model"]
        own = server.get("own", {}).get(str(client))
        if own is None:
            return dict(model)
        return {**model, **map_leaves(torch.where, own["mask"], own["model"], model)}

    async def personal_update(self, client: Client, model: Tree) -> Tree:
        """The trained model, its parameters apart from its buffers."""
        trained = await client.train(model, self.objective)
        client.publish(local=Predictor.of(trained))
        return separated(trained, client.task.network)

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        def own(clients: Sequence[int]) -> dict[int, Tree]:
            return {client: {"own": self.received_by(client, server)} for client in clients}

        having, size = [int(client) for client in server.get("own", {})], num_bytes(server["model"])
        return {"model": server["model"]}, OnDemand(having, size, own)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        model = server["model"]
        return {"global": Predictor.of(model), "personalized": Predictor.of(server.get("own") or model)}
