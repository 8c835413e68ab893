"""Robust aggregation: rules that a minority of malicious clients cannot move far, and what they need to know.

A rule sees the messages one by one. It either looks at each coordinate by itself, or chooses coefficients of the
messages, for which the inner products of their changes are enough. All is computed in float64.

Sources: Yin et al., ICML 2018 (median, trimmed mean); Blanchard et al., NeurIPS 2017 (Krum); El Mhamdi et al., ICML
2018 (Bulyan); Pillutla et al., IEEE TSP 2022 (geometric median); Sun et al., arXiv 1911.07963 (bounded norms);
Karimireddy et al., ICML 2021 (centered clipping); Shejwalkar and Houmansadr, NDSS 2021 (divide and conquer); Fung et
al., RAID 2020 (FoolsGold).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfl.params import TINY, Tree, from_leaves, leaves, stacks


def inner_products(messages: Sequence[Mapping[str, Any]], received: Mapping[str, Tensor]) -> Tensor:
    """Returns the inner products of the messages' changes, float64 of shape (n, n).

    Args:
        messages: n trees of one structure.
        received: by path, what they are changes of.
    """
    total = torch.zeros(len(messages), len(messages), dtype=torch.float64)
    for path, stack in stacks(messages):
        changes = (stack - received[path].double())[:, None].flatten(1)  # a leaf may be a single number
        total += changes @ changes.T
    return (total + total.T) / 2  # a product of BLAS is not symmetric to the bit, and equal distances must be equal


def combined(messages: Sequence[Mapping[str, Any]], received: Mapping[str, Tensor], coefficients: Tensor) -> Tree:
    """Returns ``received + sum over k of coefficient_k * change_k``, in the types of ``received``.

    Args:
        messages: n trees of one structure.
        received: by path, what they are changes of.
        coefficients: float64 of shape (n,); if they sum to 1 the result does not depend on ``received``.
    """
    rest = float(1 - coefficients.sum())
    made: Tree = {}
    for path, stack in stacks(messages):
        start = received[path]
        found = torch.tensordot(coefficients, stack, dims=1)
        made[path] = (found + rest * start.double() if abs(rest) > _ROUNDING else found).to(start.dtype)
    return from_leaves(made)


_ROUNDING = 1e-12
"""What coefficients that sum to 1 may miss it by."""


def coordinatewise(messages: Sequence[Mapping[str, Any]], rule: Callable[[Tensor], Tensor]) -> Tree:
    """Returns a rule's result on every leaf.

    Args:
        messages: n trees of one structure.
        rule: from float64 of shape (n, *leaf), sorted along the first axis, to shape (*leaf).
    """
    types = {path: leaf.dtype for path, leaf in leaves(messages[0])}
    return from_leaves({path: rule(stack.sort(dim=0).values).to(types[path]) for path, stack in stacks(messages)})


def middle(ordered: Tensor) -> Tensor:
    """Returns the median: of an even number of values the mean of the two in the middle.

    Args:
        ordered: sorted along the first axis, of length n.
    """
    n = len(ordered)
    return (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def trimmed(ordered: Tensor, each: int) -> Tensor:
    """Returns the mean without the lowest and the highest values.

    Args:
        ordered: sorted along the first axis, of length n > 2 ``each``.
        each: how many are left out at each end.
    """
    return ordered[each : len(ordered) - each].mean(0)


def around_middle(ordered: Tensor, count: int) -> Tensor:
    """Returns the mean of the values that are closest to the median.

    Args:
        ordered: sorted along the first axis.
        count: how many.
    """
    distances = (ordered - middle(ordered)).abs()
    chosen = distances.sort(dim=0, stable=True).indices[:count]
    return ordered.gather(0, chosen).mean(0)


def squared_distances(products: Tensor) -> Tensor:
    """Returns the squared distances between messages, shape (n, n).

    Args:
        products: see :func:`inner_products`.
    """
    squares = products.diagonal()
    return (squares[:, None] + squares - 2 * products).clamp(min=0)


def krum_scores(products: Tensor, malicious: int) -> Tensor:
    """Returns each message's sum of squared distances to its n - f - 2 nearest others, shape (n,).

    Args:
        products: see :func:`inner_products`.
        malicious: f, how many messages may be of malicious clients.
    """
    n = len(products)
    distances = squared_distances(products).fill_diagonal_(torch.inf)
    return distances.sort(dim=1).values[:, : max(n - malicious - 2, 1)].sum(1)


def krum_choice(products: Tensor, malicious: int, kept: int) -> list[int]:
    """Returns the positions of the messages with the lowest scores, ascending; of equal ones the first.

    Args:
        products: see :func:`inner_products`.
        malicious: f, how many messages may be of malicious clients.
        kept: how many are chosen.
    """
    order = krum_scores(products, malicious).sort(stable=True).indices[:kept]
    return sorted(int(position) for position in order)


def bulyan_choice(products: Tensor, malicious: int) -> list[int]:
    """Returns the positions of n - 2f messages, ascending: again and again Krum's first choice among those left.

    Args:
        products: see :func:`inner_products`.
        malicious: f, how many messages may be of malicious clients.
    """
    left = list(range(len(products)))
    chosen = []
    for _ in range(len(products) - 2 * malicious):
        (best,) = krum_choice(products[left][:, left], malicious, 1)
        chosen.append(left.pop(best))
    return sorted(chosen)


def geometric_median(products: Tensor, weights: Tensor, steps: int, smoothing: float) -> Tensor:
    """Returns coefficients of the smoothed geometric median, which sum to 1 (Pillutla et al., Algorithm 2).

    Args:
        products: see :func:`inner_products`.
        weights: alpha_k, which sum to 1.
        steps: T, passes of the smoothed Weiszfeld algorithm, which begins at the weighted mean.
        smoothing: nu, the least distance that is divided by.
    """
    coefficients = weights
    for _ in range(steps):
        across = products @ coefficients
        squared = products.diagonal() - 2 * across + coefficients @ across
        divided = weights / squared.clamp(min=0).sqrt().clamp(min=smoothing)
        coefficients = divided / divided.sum()
    return coefficients


def bounded(products: Tensor, weights: Tensor, radius: float | None) -> Tensor:
    """Returns the coefficients of changes that are scaled down to a radius.

    Args:
        products: see :func:`inner_products`.
        weights: which sum to 1.
        radius: the largest norm; None: the median of the norms.
    """
    norms = products.diagonal().clamp(min=0).sqrt()
    most = middle(norms.sort().values) if radius is None else torch.tensor(radius, dtype=torch.float64)
    return weights * torch.where(norms > most, most / norms, 1.0)


def clipped_around(products: Tensor, weights: Tensor, radius: float | None, iterations: int) -> Tensor:
    """Returns coefficients of the center that clipping around it ends at (Karimireddy et al., Algorithm 2).

    ``v <- v + sum over k of weight_k * min(1, radius / |x_k - v|) * (x_k - v)``, beginning at the last one.

    Args:
        products: inner products of n changes x_k and, last, of the center v that is begun with; shape (n + 1, n + 1).
        weights: of the n changes, which sum to 1.
        radius: tau; None: in each iteration the median of the distances from the center.
        iterations: how often the center moves.

    Returns:
        Shape (n + 1,): of the changes, and of the center that was begun with. They sum to 1.
    """
    center = torch.zeros(len(products), dtype=torch.float64)
    center[-1] = 1
    for _ in range(iterations):
        across = products @ center
        squared = products.diagonal() - 2 * across + center @ across
        distances = squared[:-1].clamp(min=0).sqrt()
        most = middle(distances.sort().values) if radius is None else torch.tensor(radius, dtype=torch.float64)
        taken = weights * torch.where(distances > most, most / distances, 1.0)
        center = (1 - taken.sum()) * center
        center[:-1] += taken
    return center


def sampled_products(
    messages: Sequence[Mapping[str, Any]], received: Mapping[str, Tensor], count: int, generator: np.random.Generator
) -> Tensor:
    """Returns the inner products of the changes in some coordinates, drawn without replacement; shape (n, n).

    Args:
        messages: n trees of one structure.
        received: by path, what they are changes of.
        count: how many coordinates; those of a message, if it has no more.
        generator: draws them.
    """
    sizes = [leaf.numel() for _, leaf in leaves(messages[0])]
    ends = np.cumsum(sizes)
    size = int(ends[-1])
    drawn = np.sort(generator.choice(size, size=count, replace=False)) if count < size else np.arange(size)
    total = torch.zeros(len(messages), len(messages), dtype=torch.float64)
    for (path, stack), end, own in zip(stacks(messages), ends, sizes, strict=True):
        first, last = np.searchsorted(drawn, (end - own, end))
        places = torch.as_tensor(drawn[first:last] - (end - own))
        changes = (stack - received[path].double())[:, None].flatten(1)[:, places]
        total += changes @ changes.T
    return (total + total.T) / 2  # a product of BLAS is not symmetric to the bit, and equal distances must be equal


def outlier_scores(products: Tensor) -> Tensor:
    """Returns each change's squared projection on the direction in which they differ most, shape (n,).

    That direction is the top right singular vector of the changes without their mean (Shejwalkar and Houmansadr,
    Algorithm 2). The projections are the left singular vector times the singular value, for which inner products are
    enough.

    Args:
        products: see :func:`inner_products`.
    """
    across = products.mean(1)
    centered = products - across[:, None] - across + across.mean()
    values, vectors = torch.linalg.eigh((centered + centered.T) / 2)
    scores: Tensor = values[-1].clamp(min=0) * vectors[:, -1].square()
    return scores


def similarity_weights(products: Tensor, confidence: float) -> Tensor:
    """Returns the learning rates of FoolsGold, each from 0 to 1, shape (n,): the more two are alike, the lower both.

    Fung et al., Algorithm 1; the cosine with itself counts as 0, and the learning rate 1 as 0.99 in the logit, as in
    their code.

    Args:
        products: inner products of the clients' histories, of n at least 2.
        confidence: kappa, the steepness of the logit.
    """
    norms = products.diagonal().clamp(min=0).sqrt()
    alike = (products / (norms[:, None] * norms).clamp(min=TINY)).fill_diagonal_(0)
    most = alike.max(1).values
    # Pardoning: who is less alike to anybody than the other one is not blamed for that one.
    pardoned = torch.where(most[:, None] < most, alike * most[:, None] / most.clamp(min=TINY), alike)
    rates = (1 - pardoned.max(1).values).clamp(0, 1)
    rates = (rates / rates.max().clamp(min=TINY)).clamp(max=_MOST_TRUSTED)
    return (confidence * (torch.logit(rates) + 0.5)).clamp(0, 1)


_MOST_TRUSTED = 0.99
"""The largest learning rate before the logit, which has no value at 1."""
