"""CFL: clients are split into two groups whenever federated averaging has converged for their mean but not for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from algorithms.base import setting
from algorithms.parts.split_clusters import Split, SplitClusters
from rayfl.params import Tree


def bipartition(similarities: Tensor, linkage: Literal["single", "complete"]) -> Split:
    """Two groups of the rows, the first one with row 0; both ascending.

    Args:
        similarities: symmetric, shape (m, m), m >= 2.
        linkage: ``single`` minimises the largest similarity between the groups; ``complete`` merges the groups whose
            least similar members are most similar, as public codes do.
    """
    # takes a moment to import, and few runs need it
    from scipy.cluster.hierarchy import cut_tree
    from scipy.cluster.hierarchy import linkage as merged

    pairs = np.triu_indices(len(similarities), 1)
    distances = np.maximum(1 - similarities.numpy()[pairs], 0)
    label = cut_tree(merged(distances, method=linkage), n_clusters=2)[:, 0]
    members = range(len(similarities))
    return [i for i in members if label[i] == label[0]], [i for i in members if label[i] != label[0]]


class CFL(SplitClusters):
    """CFL (clustered federated learning): federated averaging in clusters of clients, which split when they disagree.

    All clients make the update of federated averaging from their cluster's model w_c, Delta_k = x_k - w_c. A cluster
    whose mean change is small while some client's is not,

        ||mean_k Delta_k|| < eps_1    and    max_k ||Delta_k|| > eps_2,

    is split in two, so that the largest cosine between changes of the one and of the other group is as small as
    possible. Each of the two takes w_c and the mean of its own members' changes, in the same round. Norms and cosines
    are those of the parameters; buffers (running statistics) are averaged. A cluster is split once a round at most.

    Server: a model and the members of each cluster. Client: nothing. Down: w_c. Up: x_k. Evaluated: w_c
    (``personalized``). There is no global model.

    References:
        Sattler, Mueller, Samek: Clustered Federated Learning: Model-Agnostic Distributed Multi-Task Optimization under
        Privacy Constraints, IEEE TNNLS 2020, Algorithms 1-3.
    """

    name: Literal["cfl"] = "cfl"
    citation: ClassVar[str] = "Sattler et al., TNNLS 2020"

    linkage: Literal["single", "complete"] = setting(
        "single",
        "",
        "which bipartition: the one whose largest cosine between the groups is least (paper), or complete linkage "
        "(public codes)",
        unless={"mean_norm": (0,)},
    )
    gap: float | None = setting(
        None,
        "gamma_max",
        "split only if sqrt((1 - largest cosine between the groups) / 2) is larger (paper); null: always (public code)",
        ge=0,
        le=1,
        unless={"mean_norm": (0,)},
    )

    def bipartition(self, members: Sequence[int], similarities: Tensor, past: Tree) -> Split | None:
        first, second = bipartition(similarities, self.linkage)
        largest = max(float(similarities[i, j]) for i, j in product(first, second))
        if self.gap is not None and math.sqrt(max(1 - largest, 0.0) / 2) <= self.gap:
            return None
        return first, second
