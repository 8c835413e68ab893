"""FlexLoRA: the mean of the clients' products, cut back to the best adapters of each client's rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch

from algorithms.base import Clients, setting
from algorithms.parts.low_rank import decomposed_product
from algorithms.parts.means import mean_of
from algorithms.parts.ranks import A, B, SharedRanks, head_of, rank_in, sites_of, stacked, weights_of
from rayfl.aggregation.exact_sum import Weighted
from rayfl.params import Tree
from rayfl.tasks.base import Model


class FlexLoRA(SharedRanks):
    """FlexLoRA: the mean of the clients' products, cut back to the best adapters of each client's rank.

    Client k trains an adapter of rank r_k. Where federated averaging has the product of mean factors, the server has
    the mean of the products, and its singular values in descending order,

        sum_k p_k B_k A_k = U Sigma V^T,    p_k = n_k / sum_j n_j
        B <- U_r Sigma_r,    A <- V_r^T

    for each layer with adapters. The first r_k columns of B and rows of A are the best adapter of rank r_k, and
    client k receives these. What is cut off are the smaller singular values: with n clients of rank r the mean has up
    to n r of them. A head that is trained is averaged.

    The layer's matrix is never made. Two QR decompositions of the stacks [p_1 B_1, ..., p_n B_n] and [A_1; ...; A_n]
    leave a matrix of the ranks' sum, whose decomposition is that of the mean. Of two opposite singular vectors the one
    is taken whose largest entry is positive. Ranks whose singular value is 0 begin as in the initial adapter: a row of
    A, and a column of B that is zero.

    Server: A and B of rank r. Client: nothing. Down: r_k ranks of A and B. Up: A_k and B_k. Evaluated: all r ranks
    (``global``) and the first r_k (``truncated``).

    References:
        Bai, Chen, Qian, Yao, Li: Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
        Resources, NeurIPS 2024 (arXiv:2402.11505).
    """

    name: Literal["flexlora"] = "flexlora"
    citation: ClassVar[str] = "Bai et al., NeurIPS 2024"

    aggregation: Literal["samples", "uniform"] = setting(
        "samples", "p_k", "weights of the mean: samples n_k / sum over the cohort, or uniform"
    )
    singular_values: Literal["b", "both"] = setting(
        "b", "Sigma", "which factor has the singular values: b, U Sigma and V^T; both, each has their square roots"
    )

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        trained = self.trained_by(server, cohort, clients)
        initial = clients.task.network.initialize(clients.context.streams.integer("init.global"))
        return {"model": self.combined(trained, weights_of(list(trained), self.aggregation, clients), initial)}

    def combined(self, trained: Mapping[int, Model], weights: Mapping[int, int], initial: Model) -> Tree:
        """The server's model of what clients trained.

        Args:
            trained: by client, of their own ranks.
            weights: p_k, of any sum.
            initial: the model that all began from, for ranks that the mean does not have.
        """
        rank = rank_in(initial)
        found = mean_of(Weighted(head_of(trained[client]), weight) for client, weight in weights.items())
        for site in sites_of(initial):
            u, sigma, v = decomposed_product(*stacked(trained, weights, site))
            own = min(rank, len(sigma))
            b, a = torch.zeros_like(initial[site + B]), initial[site + A].clone()
            in_b = sigma[:own] if self.singular_values == "b" else sigma[:own].sqrt()
            b[:, :own] = (u[:, :own] * in_b).to(b)
            a[:own] = (v[:own] * (sigma[:own] / in_b)[:, None]).to(a)
            found |= {site + A: a, site + B: b}
        return {name: found[name] for name in initial}
