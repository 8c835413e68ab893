"""What malicious clients send in place of what they have trained.

Sources: Xie et al., UAI 2019 (inner product manipulation); Baruch et al., NeurIPS 2019 (A Little Is Enough);
Bagdasaryan et al., AISTATS 2020 (model replacement); Li et al., ICML 2021 (the three attacks that Ditto was tested
with: random labels, random messages, scaled messages); Shejwalkar and Houmansadr, NDSS 2021 (min-max and min-sum).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rayfl.aggregation.robust import inner_products, squared_distances
from rayfl.params import Tree, from_leaves, leaves, stacks

Limit = Literal["min_max", "min_sum"]
Perturbation = Literal["deviation", "unit", "sign"]

_HALVINGS = 60
"""Bits of gamma that are searched for: more than a number of float64 has."""


def scaled(message: Mapping[str, Any], received: Mapping[str, Tensor], factor: float) -> Tree:
    """Returns ``received + factor * change``.

    Args:
        message: what was trained.
        received: by path, what it is a change of.
        factor: negative to reverse the change.
    """
    return _changed(message, received, lambda path, leaf: factor * (leaf - received[path].double()))


def gaussian(
    message: Mapping[str, Any], received: Mapping[str, Tensor], deviation: float, generator: np.random.Generator
) -> Tree:
    """Returns ``received + N(0, deviation^2)`` in every element.

    Args:
        message: what was trained, of which only the shapes count.
        received: by path, what it is a change of.
        deviation: the standard deviation.
        generator: draws the numbers.
    """

    def noise(path: str, leaf: Tensor) -> Tensor:
        return deviation * torch.as_tensor(generator.standard_normal(tuple(leaf.shape)), dtype=torch.float64)

    return _changed(message, received, noise)


def against_mean(honest: Sequence[Mapping[str, Any]], received: Mapping[str, Tensor], factor: float) -> Tree:
    """Returns ``received - factor * mean change`` of the honest clients (inner product manipulation).

    Args:
        honest: what the honest clients of the round send; at least one.
        received: by path, what they are changes of.
        factor: epsilon.
    """
    mean = from_leaves({path: stack.mean(0) for path, stack in stacks(honest)})
    return scaled(mean, received, -factor)


def a_little(honest: Sequence[Mapping[str, Any]], deviations: float) -> Tree:
    """Returns ``mean - z * standard deviation`` of the honest clients' messages, by coordinate (A Little Is Enough).

    Args:
        honest: what the honest clients of the round send; at least one.
        deviations: z.
    """
    types = {path: leaf.dtype for path, leaf in leaves(honest[0])}
    found = {path: stack.mean(0) - deviations * stack.std(0, correction=0) for path, stack in stacks(honest)}
    return from_leaves({path: leaf.to(types[path]) for path, leaf in found.items()})


def most_deviations(clients: int, malicious: int) -> float:
    """Returns z_max of Baruch et al., Algorithm 3: what enough honest clients are expected to be further away by.

    Args:
        clients: n, all that send.
        malicious: m of them.

    Returns:
        The (n - m - s) / (n - m) quantile of the normal distribution with s = floor(n / 2 + 1) - m, and 0 if that is
        less than a half or the malicious are a majority already.
    """
    honest = clients - malicious
    supporters = clients // 2 + 1 - malicious
    share = (honest - supporters) / honest
    return max(NormalDist().inv_cdf(share), 0.0) if 0 < share < 1 else 0.0


def within_the_spread(
    honest: Sequence[Mapping[str, Any]], received: Mapping[str, Tensor], limit: Limit, perturbation: Perturbation
) -> Tree:
    """Returns ``mean + gamma * p`` of the honest clients' messages, with the largest gamma that is no outlier.

    Shejwalkar and Houmansadr, NDSS 2021. The length of p makes no difference, as gamma makes up for it.

    Args:
        honest: what the honest clients of the round send; at least one.
        received: by path, what they are changes of.
        limit: ``min_max``: the largest distance to an honest message is no larger than that between two of them;
            ``min_sum``: the sum of squared distances to the honest messages is no larger than that of the honest one
            with the largest.
        perturbation: p: ``deviation``: minus the standard deviations by coordinate; ``unit``: minus the mean change;
            ``sign``: minus the signs of the mean change.
    """
    moved: dict[str, Tensor] = {}
    along, length = torch.zeros(len(honest), dtype=torch.float64), 0.0
    for path, stack in stacks(honest):
        moved[path] = _away(stack, received[path].double(), perturbation)
        along += (stack.mean(0) - stack)[:, None].flatten(1) @ moved[path].flatten()
        length += float(moved[path].square().sum())
    gamma = _largest_step(inner_products(honest, received), along, length, limit)
    found = {path: stack.mean(0) + gamma * moved[path] for path, stack in stacks(honest)}
    return from_leaves({path: leaf.to(received[path].dtype) for path, leaf in found.items()})


def _away(stack: Tensor, start: Tensor, perturbation: Perturbation) -> Tensor:
    if perturbation == "deviation":
        return -stack.std(0, correction=0)
    change = (stack - start).mean(0)  # exactly 0 where nobody moved, so that its sign is 0
    return -change if perturbation == "unit" else -change.sign()


def _largest_step(products: Tensor, along: Tensor, length: float, limit: Limit) -> float:
    """Returns the largest gamma within a limit; 0 where nothing can be moved.

    Args:
        products: inner products of the honest changes, shape (n, n).
        along: inner products of p with (mean - message), shape (n,).
        length: squared norm of p.
        limit: see :func:`within_the_spread`.
    """
    distances = squared_distances(products)
    to_mean = products.diagonal() - 2 * products.mean(1) + products.mean()
    total = torch.max if limit == "min_max" else torch.sum
    most = float(distances.max() if limit == "min_max" else distances.sum(1).max())
    if not length or not most:
        return 0.0
    # No honest message is further from the mean than another one, so p alone can be no longer than twice the distance.
    low, high = 0.0, 2 * (most / length) ** 0.5
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        inside = float(total(to_mean + 2 * middle * along + middle**2 * length)) <= most
        low, high = (middle, high) if inside else (low, middle)
    return low


def _changed(
    message: Mapping[str, Any], received: Mapping[str, Tensor], change: Callable[[str, Tensor], Tensor]
) -> Tree:
    moved = {path: received[path].double() + change(path, leaf.double()) for path, leaf in leaves(message)}
    return from_leaves({path: leaf.to(received[path].dtype) for path, leaf in moved.items()})
