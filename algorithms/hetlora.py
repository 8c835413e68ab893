"""HetLoRA: adapters of unlike ranks, padded with zeros for a mean in which larger products weigh more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.parts.adapters import adapters_of
from algorithms.parts.means import mean_of
from algorithms.parts.ranks import A, B, SharedRanks, cut, padded, rank_in, sites_of, weights_of, whole_rank
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.models.pretrained.mixing import update_product
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Model, Predictor, Task


class HetLoRA(SharedRanks):
    """HetLoRA: adapters of unlike ranks, padded with zeros for a mean in which larger products weigh more.

    Client k trains the first r_k rows of A and columns of B. Its loss holds the last of them small,

        CE + lambda sum ||B_k[:, gamma r_k:]|| ||A_k[gamma r_k:]||    over the layers

    and if that sum is smaller after training than before, it gives these ranks up for good, so that gamma r_k remain.
    The server pads what clients send with zeros to rank r, and weights it by the norm of what it adds to the base,

        A <- sum_k p_k A_k,    B <- sum_k p_k B_k,    p_k = ||B_k A_k|| / sum_j ||B_j A_j||

    in which ||.|| is the Frobenius norm, of p_k over all layers. A head that is trained has the same weights.

    Server: A and B of rank r, and r_1..r_K. Client: nothing. Down: r_k ranks of A and B. Up: A_k and B_k, of which the
    server sees r_k. Evaluated: all ranks (``global``) and the first r_k (``truncated``).

    A rank that no client of the cohort has stays as it is: zeros in both factors have no gradient, so that it would be
    lost for all. With ``padding=renormalised`` a rank is the mean over those clients alone that have it, so that zeros
    of others do not shrink it.

    References:
        Cho, Liu, Xu, Fahrezi, Joshi: Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models,
        EMNLP 2024.
    """

    name: Literal["hetlora"] = "hetlora"
    citation: ClassVar[str] = "Cho et al., EMNLP 2024"
    server_keeps: ClassVar[str] = "A, B, r_1..r_K"

    aggregation: Literal["norms", "samples", "uniform"] = setting(
        "norms", "p_k", "weights of the mean: norms ||B_k A_k||, samples n_k, or all the same; relative to their sum"
    )
    padding: Literal["zeros", "renormalised"] = setting(
        "zeros",
        "",
        "how a rank that some of the clients lack is averaged: they count with zeros, or not at all",
        unless={"ranks and kept_share": ((None, 1),)},
    )
    kept_share: float = setting(
        0.99, "gamma", "share of its ranks that a client keeps when it prunes; 1: it never does", gt=0, le=1
    )
    pruning_weight: float = setting(
        0.005, "lambda", "weight of the term that holds the other ranks small", ge=0, unless={"kept_share": (1,)}
    )

    def init(self, task: Task, context: RoundContext) -> Tree:
        server, everyone = super().init(task, context), range(context.num_clients)
        ranks = {str(client): self.first_rank(client, whole_rank(task), context) for client in everyone}
        return {**server, "ranks": ranks}

    def ranks_of(self, server: Tree, clients: Sequence[int], context: RoundContext) -> dict[int, int]:
        first = super().ranks_of(server, clients, context)
        return {client: int(server["ranks"].get(str(client), rank)) for client, rank in first.items()}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        sent = self.trained_by(server, cohort, clients)
        pruned = {str(client): rank_in(tree) for client, tree in sent.items()}
        weights = self.weights(sent, clients)
        return {"model": self.combined(server["model"], sent, weights), "ranks": {**server["ranks"], **pruned}}

    async def local_update(self, client: Client, model: Tree) -> Tree:
        """Trains the received ranks; returns them, or fewer if those that the loss holds small have become smaller."""
        most, rank = whole_rank(client.task), rank_in(model)
        kept = max(math.floor(self.kept_share * rank + 1e-9), 1)
        start, places = padded(model, most), torch.arange(most, device=next(iter(model.values())).device)
        last = ((places >= kept) & (places < rank)).float()
        trained = await client.train(start, self.objective, frozen={"last": last})
        client.publish(local=Predictor.of(trained))
        smaller = bool(size_of(trained, last) < size_of(start, last))
        return cut(trained, kept if smaller else rank)

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        """CE + lambda sum ||B_k[:, gamma r_k:]|| ||A_k[gamma r_k:]||."""
        return task.loss(model, batch) + self.pruning_weight * size_of(model, frozen["last"])

    def weights(self, sent: Mapping[int, Tree], clients: Clients) -> Mapping[int, float]:
        """p_k, of any sum, by client; all the same where no client adds anything to the base."""
        if self.aggregation != "norms":
            return weights_of(list(sent), self.aggregation, clients)
        network: Any = clients.task.network
        adapters = {k: {n: t.double() for n, t in adapters_of(tree, network).items()} for k, tree in sent.items()}
        norms = {k: float(update_product(one, one, network.scale).sqrt()) for k, one in adapters.items()}
        total = math.fsum(norms.values())
        return {client: norm / total for client, norm in norms.items()} if total else dict.fromkeys(sent, 1)

    def combined(self, old: Model, sent: Mapping[int, Tree], weights: Mapping[int, float]) -> Tree:
        """The server's model after a round.

        Args:
            old: before it.
            sent: what clients trained, by client, of their own ranks.
            weights: theirs, of any sum; those of weight 0 take no part.
        """
        most = rank_in(old)
        taking = {client: weight for client, weight in weights.items() if weight > 0}
        mean = mean_of(Weighted(padded(sent[client], most), weight) for client, weight in taking.items())
        having = [math.fsum(w for client, w in taking.items() if rank_in(sent[client]) > rank) for rank in range(most)]
        if self.padding == "renormalised":
            total = math.fsum(taking.values())
            scale = torch.tensor([total / some if some else 1.0 for some in having])
        else:
            scale = torch.ones(most)
        had = torch.tensor(having) > 0
        return {name: _by_rank(name, leaf, old[name], scale, had) for name, leaf in mean.items()}


def size_of(model: Model, last: Tensor) -> Tensor:
    """The sum over layers of ||B|| ||A|| of some ranks.

    Args:
        model: with adapters.
        last: 1 for a rank that counts and 0 for another, shape (r,).
    """
    parts = [_norm(model[site + B] * last) * _norm(model[site + A] * last[:, None]) for site in sites_of(model)]
    return torch.stack(parts).sum()


def _norm(matrix: Tensor) -> Tensor:
    """The Frobenius norm; its gradient at 0 is 0."""
    squared = matrix.square().sum()
    return torch.where(squared > 0, torch.where(squared > 0, squared, 1).sqrt(), 0)


def _by_rank(name: str, mean: Tensor, old: Tensor, scale: Tensor, had: Tensor) -> Tensor:
    """A factor whose ranks are the mean's, times ``scale``, or the old ones where nobody had them."""
    if not name.endswith((A, B)):
        return mean
    axis = (slice(None), None) if name.endswith(A) else (None, slice(None))
    return torch.where(had[axis], mean * scale[axis], old)
