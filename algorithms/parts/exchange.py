"""How models are exchanged: clusters of alike ones, who receives whose, and the averages of all copies of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.params import Tree


def clustered(outputs: np.ndarray, count: int, generator: np.random.Generator) -> list[int]:
    """The k-means cluster of every row of ``outputs`` (n, f); fewer than ``count`` where fewer rows are distinct."""
    # a second of imports that only this needs
    from sklearn.cluster import KMeans
    from threadpoolctl import threadpool_limits

    distinct = len(np.unique(outputs, axis=0))
    means = KMeans(min(count, distinct), init="k-means++", n_init=10, random_state=int(generator.integers(2**32)))
    with threadpool_limits(1):  # sums by several threads depend on their number
        return [int(label) for label in means.fit_predict(outputs)]


def aggregated(replies: Mapping[int, Tree], sources: Sequence[int]) -> list[Tree]:
    """By slot the mean of all copies of its model: its owner's, and those that others received (eq. 8)."""
    sums = [ExactSum() for _ in sources]
    for i, source in enumerate(sources):
        sums[i].add(Weighted(replies[i]["personal"]))
        sums[source].add(Weighted(replies[i]["exchanged"]))
    return [total.mean() for total in sums]


def draw_sources(
    clusters: Sequence[int], rule: Literal["random", "derangement"], generator: np.random.Generator
) -> list[int]:
    """Returns whose model every slot receives: another one's of its cluster, or anybody else's if it is alone there.

    Args:
        clusters: the cluster of every slot; two slots or more.
        rule: ``random``: every slot draws for itself; ``derangement``: within a cluster every model has one receiver.
        generator: makes the same draws for equal clusters.
    """
    slots = range(len(clusters))
    mates = [[other for other in slots if other != slot and clusters[other] == clusters[slot]] for slot in slots]
    others = [mates[slot] or [other for other in slots if other != slot] for slot in slots]
    drawn = [int(generator.choice(choices)) for choices in others]
    if rule == "derangement":
        for label in sorted(set(clusters)):
            members = [slot for slot in slots if clusters[slot] == label]
            if len(members) > 1:
                order = _derangement(len(members), generator)
                drawn = [members[order[members.index(slot)]] if slot in members else drawn[slot] for slot in slots]
    return drawn


def _derangement(size: int, generator: np.random.Generator) -> list[int]:
    """A permutation of 0..size-1 without fixed points, all being equally likely; takes e shuffles on average."""
    while True:
        order = generator.permutation(size)
        if (order != np.arange(size)).all():
            return [int(place) for place in order]
