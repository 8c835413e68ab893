"""GCFL and GCFL+: clusters of clients with graphs of one kind, found by how their models change from round to round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import setting
from algorithms.parts.simplex import Array
from algorithms.parts.split_clusters import Split, SplitClusters
from rayfl.engine.round_context import RoundContext
from rayfl.params import TINY, Tree, squared_norm, subtract


def warping_distances(series: Array) -> Array:
    """Distances of every pair of series by dynamic time warping; float64 of shape (m, m), symmetric, the diagonal 0.

    That is the root of the least sum of squared differences along a path that walks through both series from their
    first numbers to their last, one number further in one of them or in both at a time.

    Args:
        series: one a row, shape (m, d), d >= 1.
    """
    count, length = series.shape
    squares = (series[:, None, :, None] - series[None, :, None, :]) ** 2
    costs = np.full((count, count, length + 1, length + 1), np.inf)
    costs[:, :, 0, 0] = 0
    for i in range(length):
        for j in range(length):
            before = np.minimum(np.minimum(costs[:, :, i, j + 1], costs[:, :, i + 1, j]), costs[:, :, i, j])
            costs[:, :, i + 1, j + 1] = squares[:, :, i, j] + before
    found: Array = np.sqrt(costs[:, :, length, length])
    return found


def least_cut(weights: Array) -> Split:
    """Two groups of the rows, the first one with row 0, with the least sum of weights between them; both ascending.

    Args:
        weights: of every pair, symmetric and not negative, shape (m, m), m >= 2.

    Source: Stoer, Wagner: A Simple Min-Cut Algorithm, Journal of the ACM 1997.
    """
    # takes a moment to import, and few runs need it
    import networkx

    graph = networkx.Graph()
    for i in range(len(weights)):
        graph.add_weighted_edges_from((i, j, float(weights[i, j])) for j in range(i))
    _, (one, _) = networkx.stoer_wagner(graph)
    other, members = set(one), range(len(weights))
    first, second = [i for i in members if i in other], [i for i in members if i not in other]
    return (first, second) if 0 in other else (second, first)


class GCFL(SplitClusters):
    """GCFL (graph clustered federated learning), and GCFL+: clusters of clients, which split along a least cut.

    All clients make the update of federated averaging from their cluster's model w_c, Delta_k = x_k - w_c. A cluster
    whose mean change is small while some client's is not,

        ||mean_k Delta_k|| < eps_1    and    max_k ||Delta_k|| > eps_2,

    is split in two groups between which the sum of weights a_ij is least. In GCFL a_ij = 1 + cos(Delta_i, Delta_j). In
    GCFL+ (``compare=norms``) the server keeps the norms of each client's last d changes, and a_ij = max D - D_ij, where
    D_ij is the distance of two series by dynamic time warping: a single round's directions say little of graphs, how
    norms go up and down says more. A cluster is split when all of its members have d norms, and they begin new series.
    Each of the two groups takes w_c and the mean of its own members' changes, in the same round. Norms and cosines are
    those of the parameters; buffers (running statistics) are averaged. A cluster is split once a round at most.

    Nothing of this needs graphs: any task and model will do.

    Server: a model and the members of each cluster; of GCFL+ the norms. Client: nothing. Down: w_c. Up: x_k. Evaluated:
    w_c (``personalized``). There is no global model.

    References:
        Xie, Ma, Xiong, Yang: Federated Graph Classification over Non-IID Graphs, NeurIPS 2021.
    """

    name: Literal["gcfl"] = "gcfl"
    citation: ClassVar[str] = "Xie et al., NeurIPS 2021"
    server_keeps: ClassVar[str] = "w_c, clusters, norms"

    mean_norm: float = setting(0.05, "eps_1", "a cluster may be split if its mean change is shorter; 0: never", ge=0)
    max_norm: float = setting(0.1, "eps_2", "and if a member's change is longer", ge=0, unless={"mean_norm": (0,)})
    aggregation: Literal["uniform", "samples"] = setting(
        "samples", "q_k", "weights of a cluster's mean: samples n_k (authors' code), or uniform"
    )
    compare: Literal["norms", "changes"] = setting(
        "norms",
        "",
        "what tells clients apart: series of norms (GCFL+), or the directions of the last changes (GCFL)",
        unless={"mean_norm": (0,)},
    )
    length: int = setting(5, "d", "norms in a series", ge=2, only={"compare": ("norms",)}, unless={"mean_norm": (0,)})
    standardize: bool = setting(
        False,
        "",
        "divide each series by its standard deviation, so that only its course counts",
        only={"compare": ("norms",)},
        unless={"mean_norm": (0,)},
    )

    def remarks(self, context: RoundContext) -> Sequence[str]:
        found = super().remarks(context)
        if found or self.compare == "changes" or self.length <= context.rounds or not self.mean_norm:
            return found
        return (
            f"the clients stay one cluster: a series has algorithm.length={self.length} norms, one a round, but the "
            f"run has {context.rounds} rounds",
        )

    def remembered(self, server: Tree, sent: Mapping[int, Tree], trained: Mapping[int, Tree]) -> Tree:
        """The norms of the last d changes of each client that took part, the newest last."""
        if self.compare == "changes" or not self.mean_norm:
            return {"norms": {}} if "norms" in server else {}  # a fork's series would have a gap
        norms = dict(server.get("norms", {}))
        for client, answer in trained.items():
            change = subtract(
                answer["parameters"], {name: sent[client]["model"][name] for name in answer["parameters"]}
            )
            newest = squared_norm(change).double().sqrt().reshape(1)
            before = norms.get(str(client), newest[:0])
            norms[str(client)] = torch.cat((before, newest))[-self.length :]
        return {"norms": norms}

    def forgotten(self, past: Tree, members: Sequence[int]) -> Tree:
        if "norms" not in past:
            return past
        return {"norms": {client: one for client, one in past["norms"].items() if int(client) not in members}}

    def bipartition(self, members: Sequence[int], similarities: Tensor, past: Tree) -> Split | None:
        if self.compare == "changes":
            return least_cut(np.maximum(1 + similarities.numpy(), 0))
        found = [past["norms"][str(client)] for client in members]
        if min(len(one) for one in found) < self.length:
            return None
        series = torch.stack(found).cpu().numpy()
        if self.standardize:
            series = series / np.maximum(series.std(axis=1, keepdims=True), TINY)
        distances = warping_distances(series)
        return least_cut(distances.max() - distances)
