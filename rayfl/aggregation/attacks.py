"""What malicious clients send in place of what they have trained.

Sources: Xie et al., UAI 2019 (inner product manipulation); Baruch et al., NeurIPS 2019 (A Little Is Enough);
Bagdasaryan et al., AISTATS 2020 (model replacement); Li et al., ICML 2021 (the three attacks that Ditto was tested
with: random labels, random messages, scaled messages).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfl.params import Tree, from_leaves, leaves, stacks


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


def _changed(
    message: Mapping[str, Any], received: Mapping[str, Tensor], change: Callable[[str, Tensor], Tensor]
) -> Tree:
    moved = {path: received[path].double() + change(path, leaf.double()) for path, leaf in leaves(message)}
    return from_leaves({path: leaf.to(received[path].dtype) for path, leaf in moved.items()})
