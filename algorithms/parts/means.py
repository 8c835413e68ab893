"""Means that the server takes by itself, of trees that clients have sent one by one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from algorithms.base import Averaging, Clients
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.params import Tree


def mean_of(contributions: Iterable[Weighted]) -> Tree:
    """The weighted mean of some trees, the same bits in any order."""
    total = ExactSum()
    for contribution in contributions:
        total.add(contribution)
    return total.mean()


def mean_over_cohort(
    method: Averaging,
    trees: Mapping[int, Tree],
    old: Tree,
    clients: Clients,
    factors: Mapping[int, float] | None = None,
) -> Tree:
    """The mean of the trees of a cohort, with the weights that ``aggregation`` gives them.

    Args:
        method: whose ``aggregation`` counts.
        trees: by client.
        old: what the server has in the place of such a tree, on which the rest stays under ``population``.
        clients: the clients, which know their samples.
        factors: by client, what its weight is multiplied by; None: 1.
    """
    samples = clients.num_samples(list(trees)).tolist()
    weights = [1] * len(trees) if method.aggregation == "uniform" else samples
    if factors is not None:
        weights = [weight * factors[client] for client, weight in zip(trees, weights, strict=True)]
    rest = method.remainder(old, list(trees), clients)
    return mean_of([*map(Weighted, trees.values(), weights), *([] if rest is None else [rest])])
