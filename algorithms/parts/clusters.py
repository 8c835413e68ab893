"""Clusters of clients: those of hierarchical clustering, and the evaluation of methods with one model a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from algorithms.parts.finetuning import FineTuning
from algorithms.parts.simplex import Array
from rayfl.engine.client import Client
from rayfl.params import Tree
from rayfl.tasks.base import Predictor

Linkage = Literal["average", "weighted", "complete", "single"]
"""The distance of two clusters: the mean over pairs of members; the mean of those of the two clusters that were merged
last, whatever their sizes; the largest; the least."""


class ClusterModels(FineTuning):
    """A method whose clients each use the model of a cluster, which they may fine-tune after the last round."""

    personalized: ClassVar[str] = "personalized"

    async def rows(self, client: Client, model: Tree) -> dict[str, Predictor]:
        """Returns the rows of a client: its cluster's model, and with ``finetune_epochs`` what it makes of it.

        Args:
            client: who is scored.
            model: of its cluster.
        """
        found = await super().predictors(client, {"model": model})
        return {"personalized": found.pop("global"), **found}


async def fitting_model(client: Client, models: Tree) -> Tree:
    """Returns the model with the smallest loss on a client's training samples, the first of several.

    Args:
        client: a client that belongs to no cluster, as a newcomer.
        models: those of the clusters, by their numbers.
    """
    losses = {number: (await client.score(Predictor.of(model), "train")).loss for number, model in models.items()}
    found: Tree = models[min(losses, key=lambda number: (losses[number], int(number)))]
    return found


def hierarchical_clusters(
    distances: Array, linkage: Linkage, threshold: float, most: int | None = None
) -> list[list[int]]:
    """Returns the clusters that are left when no two are near enough to merge; ascending, by their first members.

    Args:
        distances: symmetric, shape (K, K).
        linkage: the distance of two clusters.
        threshold: clusters further apart than this are not merged.
        most: merge instead until there are at most this many clusters.
    """
    if len(distances) < 2:
        return [[place] for place in range(len(distances))]
    # takes a moment to import, and few runs need it
    from scipy.cluster.hierarchy import fcluster
    from scipy.cluster.hierarchy import linkage as merged

    tree = merged(distances[np.triu_indices(len(distances), 1)], method=linkage)
    labels = fcluster(tree, threshold, "distance") if most is None else fcluster(tree, most, "maxclust")
    members: dict[int, list[int]] = {}
    for place, label in enumerate(labels.tolist()):
        members.setdefault(label, []).append(place)
    return list(members.values())


def nearest_cluster(distances: Array, clusters: Sequence[int], linkage: Linkage) -> int:
    """Returns the cluster that a further client is nearest to, of equal ones the first.

    Args:
        distances: to each client, shape (K,).
        clusters: the cluster of each client, shape (K,).
        linkage: the distance to a cluster; ``weighted`` is the mean, as ``average``.
    """
    among = {"complete": np.max, "single": np.min}.get(linkage, np.mean)
    numbers = np.asarray(clusters)
    found = {number: float(among(distances[numbers == number])) for number in sorted(set(clusters))}
    return min(found, key=lambda number: (found[number], number))
