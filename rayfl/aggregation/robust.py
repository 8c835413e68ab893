"""Robust aggregation: rules that a minority of malicious clients cannot move far, and what they need to know.

A rule sees the messages one by one. It either looks at each coordinate by itself, or chooses coefficients of the
messages, for which the inner products of their changes are enough. All is computed in float64.

Sources: Yin et al., ICML 2018 (median, trimmed mean); Blanchard et al., NeurIPS 2017 (Krum); El Mhamdi et al., ICML
2018 (Bulyan); Pillutla et al., IEEE TSP 2022 (geometric median); Sun et al., arXiv 1911.07963 (bounded norms).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayfl.params import Tree, from_leaves, leaves, stacks


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
    return total


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


def krum_scores(products: Tensor, malicious: int) -> Tensor:
    """Returns each message's sum of squared distances to its n - f - 2 nearest others, shape (n,).

    Args:
        products: see :func:`inner_products`.
        malicious: f, how many messages may be of malicious clients.
    """
    n = len(products)
    squares = products.diagonal()
    distances = (squares[:, None] + squares - 2 * products).clamp(min=0)
    distances.fill_diagonal_(torch.inf)
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
